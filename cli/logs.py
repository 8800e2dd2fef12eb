"""``unicron logs``."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.interrupt import end_at_once
from cli.options import Format, Output, Server, Since, TaskName, moment

Entry = dict[str, Any]
"""A line of output, or what is missing, as the interface has it."""


def logs(
    task: TaskName,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the worker of this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the task ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last so many lines of each worker.")] = None,
    since: Since = None,
    grep: Annotated[str | None, typer.Option(metavar="PATTERN", help="Only lines in which this expression is.")] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Print what a task's ranks print.

    --since: lines have no times, but agents note how much was printed by when: what is up to 6 s older may come, too.
    Output on a node that does not answer is left out; standard error says whose, and on which node.
    With -o json: one object a line, with the worker, the generation and the line; for what is left out one with the
    workers, the node and the problem.
    """
    from cli.client import Client
    from shared.errors import InvalidInput

    if follow and tail is not None:
        raise InvalidInput("--tail: not with --follow, which has no last line")
    wanted = _expression(grep)
    if follow:
        end_at_once()
    path = f"/v1/tasks/{quote(task, safe='')}/logs"
    params = {"rank": rank, "follow": follow, "since": moment(since)}
    with Client(server) as client, client.lines(path, params, accept="application/x-ndjson") as lines:
        for entry in last_lines(matching(map(json.loads, lines), wanted), tail):
            if output is Format.JSON:
                print(json.dumps(entry), flush=follow)
            else:
                _print(entry, named=rank is None, flush=follow)


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
        text = f"--grep: {pattern!r} {problem}"
        raise InvalidInput(text, [{"field": "--grep", "value": pattern, "problem": problem}]) from err


def matching(entries: Iterable[Entry], wanted: re.Pattern[str] | None) -> Iterator[Entry]:
    """Yield the lines in which the expression is, and all that says what is missing."""
    return (entry for entry in entries if wanted is None or "problem" in entry or wanted.search(entry["line"]))


def last_lines(entries: Iterable[Entry], number: int | None) -> Iterator[Entry]:
    """Yield the last lines of each worker, in their order, and all that says what is missing; None: all lines."""
    if number is None:
        yield from entries
        return
    kept: dict[str, deque[tuple[int, Entry]]] = {}
    for place, entry in enumerate(entries):
        if "problem" in entry:
            yield entry
        else:
            kept.setdefault(entry["worker"], deque(maxlen=number)).append((place, entry))
    yield from (entry for _, entry in sorted((pair for each in kept.values() for pair in each), key=lambda p: p[0]))


def _print(entry: Entry, *, named: bool, flush: bool) -> None:
    """Print a line of output, or to standard error what is left out."""
    if "problem" in entry:
        print(f"unicron: {entry['problem']}", file=sys.stderr, flush=True)
    else:
        print(f"{entry['worker']} | {entry['line']}" if named else entry["line"], flush=flush)
