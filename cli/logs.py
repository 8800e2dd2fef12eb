"""``unicron logs``."""

from __future__ import annotations

import json
import sys
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

    Output on a node that does not answer is left out; standard error says whose, and on which node.
    With -o json: one object a line, with the worker, the generation and the line; for what is left out one with the
    workers, the node and the problem.
    """
    from cli.client import Client

    if follow:
        end_at_once()
    path = f"/v1/tasks/{quote(task, safe='')}/logs"
    params = {"rank": rank, "follow": follow}
    with Client(server) as client, client.lines(path, params, accept="application/x-ndjson") as lines:
        for line in lines:
            if output is Format.JSON:
                print(line, flush=follow)
            else:
                _print(json.loads(line), named=rank is None, flush=follow)


def _print(entry: dict[str, str], *, named: bool, flush: bool) -> None:
    """Print a line of output, or to standard error what is left out."""
    if "problem" in entry:
        print(f"unicron: {entry['problem']}", file=sys.stderr, flush=True)
    else:
        print(f"{entry['worker']} | {entry['line']}" if named else entry["line"], flush=flush)
