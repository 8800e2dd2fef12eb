"""``unicron open``."""

from __future__ import annotations

import sys
import webbrowser
from typing import Annotated

import typer

from cli.options import Format, Output, Server, connected
from cli.output import print_json, printed_json
from shared.errors import InvalidInput


def open(
    browse: Annotated[bool, typer.Option("--browse", help="Open the link with this machine's browser, too.")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="End your browsers' sessions instead.")] = False,
    everybody: Annotated[bool, typer.Option("--everybody", help="With --revoke: end those of all.")] = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Print a link that lets a browser use the server, with the rights that you have here.

    It can be opened once, within two minutes. The browser's session ends after twelve hours, with --revoke, or when the
    token is removed by which you use the server.
    """
    if everybody and not revoke:
        raise InvalidInput("--everybody: goes with --revoke only")
    if browse and revoke:
        raise InvalidInput("--browse: does not go with --revoke, which makes no link")
    with connected(server) as client:
        if revoke:
            answer = client.request("DELETE", "/v1/browser-sessions", params={"everybody": everybody})
            print_json(answer) if output is Format.JSON else print(f"ended: {answer['ended']}")
            return
        made = client.post("/v1/browser-links")
        url = f"{client.server.rstrip('/')}{made['path']}"
    if not printed_json({"url": url, "expires_at": made["expires_at"]}, output):
        print(url, flush=True)
    if browse and not webbrowser.open(url):
        print("unicron: no browser was found here; open the link yourself", file=sys.stderr)
