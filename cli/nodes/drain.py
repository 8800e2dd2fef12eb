"""``unicron cordon`` and ``drain``: nodes that take no new work."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.options import Format, NodeName, Output, Server, connected
from cli.output import printed_json


def cordon(
    node: NodeName,
    reason: Annotated[str, typer.Option(help="Why, for other people.")] = "",
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Place no new work on a node; what runs there stays.

    The cordon holds until `unicron return`, also when the node's agent is started again.
    """
    with connected(server) as client:
        answer = client.post(f"/v1/nodes/{quote(node, safe='')}/cordon", {"reason": reason})
    if not printed_json(answer, output):
        print(f"{answer['name']}: {answer['state']}")


def drain(
    node: NodeName,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is empty, and say what became of its tasks.")] = (
        False
    ),
    timeout_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds that tasks may take to move; else the server's setting.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for other people.")] = "",
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Empty a node: its tasks move away without a lost step, or save and wait.

    The node takes no new work until `unicron return`, also when its agent is started again.
    """
    from cli.waiting import wait_until_drained

    path = f"/v1/nodes/{quote(node, safe='')}"
    with connected(server) as client:
        tasks = sorted({w["task"] for w in client.get(path)["workers"] if w["task"] is not None})
        answer = client.post(f"{path}/drain", {"reason": reason, "timeout_s": timeout_s})
        found: list[Any] = []
        if wait:
            answer = wait_until_drained(server, answer["name"])
            found = [client.get(f"/v1/tasks/{quote(name, safe='')}") for name in tasks]
    if printed_json(answer, output):
        return
    print(f"{answer['name']}: {answer['state']}")
    for task in found:
        nodes = sorted({rank["node"] for rank in task["ranks"]})
        where = f"on {' '.join(nodes)}" if nodes else task["reason"]
        print(f"{task['name']}: {task['state']} at step {task['step']}, {where}")
