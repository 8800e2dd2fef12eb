"""``unicron postmortem``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.ids import postmortem_path
from cli.options import FaultId, Server, connected
from cli.output import print_json, print_markdown
from shared.errors import InvalidInput


class PageFormat(StrEnum):
    """How the page is written."""

    MARKDOWN = "md"
    HTML = "html"
    JSON = "json"


def postmortem(
    fault: FaultId,
    file: Annotated[
        Path | None, typer.Option("--file", help="Write the page there, not to standard output.", dir_okay=False)
    ] = None,
    server: Server = None,
    output: Annotated[
        PageFormat,
        typer.Option("--output", "-o", help="md (laid out where it is a terminal), html (one file), or json"),
    ] = PageFormat.MARKDOWN,
) -> None:
    """Print the post-mortem of a fault: its course, the decisions and their reasons, its cost.

    The page says what failed, what saw it and how late, what was decided and why not otherwise, where state came from,
    how long each phase took, what it cost, and what earlier faults were like it. Positions in the log prove each line.

    INCIDENT: the id of an incident, or of a slow worker, which is no incident. The name of a worker, such as n1/0,
    stands for the newest time that it was slow.
    """
    with connected(server) as client:
        path = postmortem_path(client, fault)
        if output is PageFormat.JSON and file is None:
            print_json(client.get(path))
            return
        page = client.text(path, {"format": output.value})
    if file is None:
        if output is PageFormat.MARKDOWN and sys.stdout.isatty():
            print_markdown(page)
        else:
            sys.stdout.write(page)
        return
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as err:
        raise InvalidInput(f"--file: {str(file)!r}: {err.strerror or err}") from err
    print(file)
