"""``unicron logs``."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from cli.interrupt import end_at_once
from cli.options import Format, Output, Server, TaskName


def logs(
    task: TaskName,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the worker of this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the task ends.")] = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Print what a task's ranks print.

    With -o json: one object a line, with the worker, the generation and the line.
    """
    from cli.client import Client

    if follow:
        end_at_once()
    accept = "application/x-ndjson" if output is Format.JSON else "text/plain"
    path = f"/v1/tasks/{quote(task, safe='')}/logs"
    with Client(server) as client, client.lines(path, {"rank": rank, "follow": follow}, accept=accept) as lines:
        for line in lines:
            print(line, flush=follow)
