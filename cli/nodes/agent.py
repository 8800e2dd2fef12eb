"""``unicron agent``: a node's agent, in the foreground; and one that works elsewhere, started again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from cli.options import Format, NodeName, Output, Server, given
from cli.output import print_json
from shared.errors import Conflict, InvalidInput

app = typer.Typer(no_args_is_help=True, add_completion=False)

TIMEOUT_S = 60.0
"""An agent starts in one to two seconds, on a busy machine in ten. It may have to wait for NATS or the detector."""


@app.callback(invoke_without_command=True)
def agent(
    context: typer.Context,
    join: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The node's credential, which `unicron node add` has made.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker slots. Default: UNICRON_WORKERS_PER_NODE, the GPUs that are found, or 2."),
    ] = None,
    domain: Annotated[
        str | None, typer.Option(help="Failure domain, such as the rack. Default: UNICRON_DOMAIN or default.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for what the node writes. Default: UNICRON_RUN_DIR or .unicron.")
    ] = None,
) -> None:
    """Run this machine's node agent, or have a node's agent started again.

    With --join FILE this is the agent of the node that FILE is for: its name, where NATS is and whose certificates that
    has are in there. It runs in the foreground; SIGTERM and Ctrl-C drain the node first.
    """
    changes = given(workers_per_node=workers, domain=domain, run_dir=run_dir)
    if context.invoked_subcommand is not None:
        if join is not None or changes:
            raise InvalidInput(f"--join and the options beside it do not go with {context.invoked_subcommand}")
        return
    if join is None:
        raise InvalidInput("--join is needed: FILE, which `unicron node add` has made for this node")
    from cli.nodes.join import run_agent

    run_agent(join, changes)


@app.command("restart")
def restart(
    node: NodeName,
    timeout_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for the next agent.")] = TIMEOUT_S,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Start a node's agent again, of the program that is installed now; ranks train on, and no step is lost.

    The node's supervisor, fork server and ranks stay as they are. To replace these, drain the node and restart its
    service.
    """
    from cli.client import Client
    from cli.waiting import wait_for_successor

    begun_s = time.monotonic()
    with Client(server) as client:
        before = client.post(f"/v1/nodes/{quote(node, safe='')}/agent/restart")
    after = wait_for_successor(server, before["name"], before["incarnation"], timeout_s)
    if after["incarnation"] == before["incarnation"]:
        raise Conflict(f"node {node!r} is {after['state']}: {after['reason']}", state=after["state"])
    if output is Format.JSON:
        print_json(after)
        return
    ranks = sum(worker["task"] is not None for worker in after["workers"])
    taken_s = time.monotonic() - begun_s
    agent_pid = after["agent_pid"]
    print(f"{after['name']}: {after['state']}, agent {agent_pid} after {taken_s:.1f} s, with {ranks} ranks")
