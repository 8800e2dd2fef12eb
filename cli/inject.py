"""``unicron inject``."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from cli.completion import task_or_node_names
from cli.options import Format, Output, Server
from cli.output import print_json


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
        int | None, typer.Option(min=1, help="At which step of the rank. Default: the next one that it begins.")
    ] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Have a fault happen, as a test: refused unless the setting fault_injection is on.

    The server and its agents need UNICRON_FAULT_INJECTION=1. The fault is in the log before it happens.
    """
    from cli.client import Client
    from shared.injection import parse, refusal

    found = parse(fault)
    if found.of_rank and rank is None:
        raise refusal("--rank", None, f"{found.kind} needs the rank that it is to strike")
    if not found.of_rank and (rank is not None or step is not None):
        raise refusal("--rank, --step", rank if step is None else step, f"{found.kind} strikes a node, at once")
    with Client(server) as client:
        if found.of_rank:
            answer = client.post(
                f"/v1/tasks/{quote(name, safe='')}/faults", {"fault": fault, "rank": rank, "step": step}
            )
        else:
            answer = client.post(f"/v1/nodes/{quote(name, safe='')}/faults", {"fault": fault})
    if output is Format.JSON:
        print_json(answer)
    elif found.of_rank:
        when = f"step {step}" if step is not None else "its next step"
        print(f"{name}: {answer['fault']} in rank {rank} ({answer['worker']}) at {when}")
    else:
        print(f"{name}: {answer['fault']}")
