"""What a task's ranks have printed: which of it is wanted."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from unicron_client.answers import Record, task_path
from unicron_client.connection import Connection


class OutputLine(NamedTuple):
    """A line that a rank has printed, without its end. ``worker`` stays when ranks are renumbered."""

    worker: str
    generation: int
    line: str


class MissingOutput(NamedTuple):
    """Output that is left out since its ``node`` does not answer: whose, and why in words."""

    workers: list[str]
    node: str
    problem: str


def output(
    connection: Connection,
    name: str,
    *,
    rank: int | None = None,
    follow: bool = False,
    tail: int | None = None,
    since: str | None = None,
    wanted: re.Pattern[str] | None = None,
) -> Iterator[Record]:
    """Yield what a task's ranks have printed as JSON, a line each, and what is left out with a ``problem``.

    Args:
        connection: to the server.
        name: of the task.
        rank: only the worker of this rank.
        follow: wait for more until the task ends.
        tail: of what there is already, only the last so many lines of each worker; None: all. Without ``follow`` those
            are lines that are ``wanted``; with it they are searched for such lines.
        since: only what was printed from then on.
        wanted: only lines in which it is found.
    """
    # The server does not search: where the last of the lines that are found are wanted, it sends all.
    sent = tail if follow or wanted is None else None
    params = {"rank": rank, "follow": follow, "since": since, "tail": sent}
    with connection.lines(f"{task_path(name)}/logs", params, accept="application/x-ndjson") as lines:
        yield from last_lines(matching(map(json.loads, lines), wanted), None if follow else tail)


def matching(entries: Iterable[Record], wanted: re.Pattern[str] | None) -> Iterator[Record]:
    """Yield the lines in which the expression is, and all that says what is missing."""
    return (entry for entry in entries if wanted is None or "problem" in entry or wanted.search(entry["line"]))


def last_lines(entries: Iterable[Record], number: int | None) -> Iterator[Record]:
    """Yield the last lines of each worker, in their order, and all that says what is missing; None: all lines."""
    if number is None:
        yield from entries
        return
    kept: dict[str, deque[tuple[int, Record]]] = {}
    for place, entry in enumerate(entries):
        if "problem" in entry:
            yield entry
        else:
            kept.setdefault(entry["worker"], deque(maxlen=number)).append((place, entry))
    yield from (entry for _, entry in sorted((pair for each in kept.values() for pair in each), key=lambda p: p[0]))
