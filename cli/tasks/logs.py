"""``unicron logs``."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.interrupt import end_at_once
from cli.options import Format, Output, Server, Since, TaskName, connected, moment
from cli.output import printable

Entry = dict[str, Any]
"""A line of output, or what is missing, as the interface has it."""

_WAITING = frozenset({"pending", "queued"})
"""States of a task that does not train yet, or not now."""


def logs(
    task: TaskName,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the worker of this rank.")] = None,
    worker: Annotated[
        str | None, typer.Option(metavar="WORKER", help="Only this worker, such as n0/1: it stays when ranks change.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the task ends.")] = False,
    tail: Annotated[
        int | None,
        typer.Option(min=0, max=1_000_000, help="Of what there is: only the last so many lines of each worker."),
    ] = None,
    since: Since = None,
    grep: Annotated[str | None, typer.Option(metavar="PATTERN", help="Only lines in which this expression is.")] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Print what a task's ranks print.

    With --follow --tail: the last lines, and then what comes. --grep picks from these; without --follow the last lines
    are those of the ones that --grep has picked. Of a task that has printed nothing, standard error says why.

    --since: lines have no times, but agents note how much was printed by when: what is up to 6 s older may come, too.
    Output on a node that does not answer is left out; standard error says whose, and on which node.
    With -o json: one object a line, with the worker, the generation and the line; for what is left out one with the
    workers, the node and the problem.
    """
    from unicron_client.output import output as output_of

    wanted = _expression(grep)
    if follow:
        end_at_once()
    path = f"/v1/tasks/{quote(task, safe='')}"
    with connected(server) as client:
        if follow:
            _say_why_silent(client.get(path))
        printed = False
        found = output_of(client, task, rank=rank, follow=follow, tail=tail, since=moment(since), wanted=wanted)
        for entry in found:
            if worker is not None and worker not in entry.get("workers", [entry.get("worker")]):
                continue
            printed = True
            if output is Format.JSON:
                print(json.dumps(entry), flush=follow)
            else:
                _print(entry, named=rank is None and worker is None, flush=follow)
        if not printed and not follow:
            _say_why_silent(client.get(path))


def _say_why_silent(task: Entry) -> None:
    """Say on standard error why a task that waits to train prints nothing; of another task say nothing."""
    if task["state"] in _WAITING:
        why = f": {task['reason']}" if task["reason"] else ""
        print(f"unicron: {task['name']} is {task['state']} and prints nothing now{why}", file=sys.stderr, flush=True)


def _expression(pattern: str | None) -> re.Pattern[str] | None:
    """Return the expression of ``--grep``.

    Raises:
        InvalidInput: it is none.
    """
    from shared.errors import InvalidInput

    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as err:
        problem = f"must be a regular expression of Python: {err}"
        raise InvalidInput.of("--grep", pattern, problem) from err


def _print(entry: Entry, *, named: bool, flush: bool) -> None:
    """Print a line of output, or to standard error what is left out."""
    if "problem" in entry:
        print(f"unicron: {entry['problem']}", file=sys.stderr, flush=True)
    else:
        line = _without_controls(entry["line"]) if sys.stdout.isatty() else entry["line"]
        print(f"{entry['worker']} | {line}" if named else line, flush=flush)


def _without_controls(line: str) -> str:
    """Return a line without what a terminal would obey; a carriage return has written over what was before it."""
    from rich.text import Text

    return printable(Text.from_ansi(line).plain)
