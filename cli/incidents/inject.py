"""``unicron inject``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from cli.completion import task_or_node_names
from cli.options import Format, Output, Server, connected
from cli.output import print_json

if TYPE_CHECKING:
    from unicron_client.resources import Client


def inject(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TASK|NODE", help="The task of the rank, or the node.", autocompletion=task_or_node_names
        ),
    ],
    fault: Annotated[
        str,
        typer.Option(
            help="Of a rank: kill, exception, hang[=KIND], slow=FACTOR, nan[=PARAMETER],"
            " spike[=FACTOR], oom. Of a node: disconnect[=SECONDS|forever], xid=CODE[:DEVICE]."
            " Kinds of hangs: stop, sleep, deadlock, spin, collective."
        ),
    ],
    rank: Annotated[int | None, typer.Option(min=0, help="The rank, for a fault of a rank.")] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="The step at whose start it happens. Default: the rank's next one.")
    ] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Have a fault happen, as a test: refused unless the setting fault_injection is on.

    The server and its agents need UNICRON_FAULT_INJECTION=1. The fault is in the log before it happens.
    """
    from shared.errors import NotFound
    from shared.messages.injection import parse, refusal

    found = parse(fault)
    if found.of_rank and rank is None:
        raise refusal("--rank", None, _rank_is_missing(name, found.kind, server))
    if not found.of_rank and (rank is not None or step is not None):
        raise refusal("--rank, --step", rank if step is None else step, f"{found.kind} strikes a node, at once")
    body = {"fault": fault, "rank": rank, "step": step} if found.of_rank else {"fault": fault}
    with connected(server) as client:
        try:
            answer = client.post(f"/v1/{'tasks' if found.of_rank else 'nodes'}/{quote(name, safe='')}/faults", body)
        except NotFound as err:
            if found.of_rank and _is_there(client, "nodes", name):
                raise NotFound(f"{name} is a node; {found.kind} strikes a rank of a task: give the task") from err
            if not found.of_rank and _is_there(client, "tasks", name):
                raise NotFound(f"{name} is a task; {found.kind} strikes a node: give the node") from err
            raise
    if output is Format.JSON:
        print_json(answer)
    elif found.of_rank:
        when = f"step {step}" if step is not None else "its next step"
        print(f"{name}: {answer['fault']} in rank {rank} ({answer['worker']}) at {when}")
    else:
        print(f"{name}: {answer['fault']}")


def _rank_is_missing(name: str, kind: str, server: str | None) -> str:
    """Return what is wrong with a fault of a rank without a rank; also that NAME is a node, if the server says so."""
    from shared.errors import UnicronError

    what = f"{kind} strikes a rank of a task: give the task, and --rank"
    try:
        with connected(server) as client:
            of_node = _is_there(client, "nodes", name) and not _is_there(client, "tasks", name)
    except UnicronError:
        return what
    return f"{name} is a node, and {what}" if of_node else what


def _is_there(client: Client, kind: str, name: str) -> bool:
    """Return whether there is a task or a node of this name. ``kind``: ``tasks`` or ``nodes``."""
    from shared.errors import NotFound

    try:
        client.get(f"/v1/{kind}/{quote(name, safe='')}")
    except NotFound:
        return False
    return True
