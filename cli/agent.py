"""``unicron agent restart``."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

import typer

from cli.options import Format, NodeName, Output, Server
from cli.output import print_json
from shared.errors import Conflict

app = typer.Typer(no_args_is_help=True, add_completion=False)

TIMEOUT_S = 60.0
"""An agent starts in one to two seconds, on a busy machine in ten. It may have to wait for NATS or the detector."""


@app.callback()
def agent() -> None:
    """Start the agent of a node again; ranks train on."""


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
