"""``unicron cordon``: a node takes no new work."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from cli.options import Format, NodeName, Output, Server
from cli.output import print_json


def cordon(
    node: NodeName,
    reason: Annotated[str, typer.Option(help="Why, for other people.")] = "",
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Place no new work on a node; what runs there stays.

    The cordon holds until `unicron return`, also when the node's agent is started again.
    """
    from cli.client import Client

    with Client(server) as client:
        answer = client.post(f"/v1/nodes/{quote(node, safe='')}/cordon", {"reason": reason})
    if output is Format.JSON:
        print_json(answer)
    else:
        print(f"{answer['name']}: {answer['state']}")
