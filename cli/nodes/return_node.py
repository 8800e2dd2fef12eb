"""``unicron return``."""

from __future__ import annotations

from urllib.parse import quote

import typer

from cli.options import Format, NodeName, Output, Server, connected
from cli.output import printed_json

app = typer.Typer(add_completion=False)


@app.command("return")
def return_node(node: NodeName, server: Server = None, output: Output = Format.TEXT) -> None:
    """Use a cordoned, drained or isolated node again.

    The node's agent tests itself first: folders, processes, computation, memory, bandwidth to others.
    """
    from unicron_client.operations import SELF_TEST_S

    with connected(server) as client:
        answer = client.post(f"/v1/nodes/{quote(node, safe='')}/return", read_timeout_s=SELF_TEST_S)
    if not printed_json(answer, output):
        print(f"{answer['name']}: {answer['state']}")
