"""A log of a million events in about a minute: a course (``benchmarks.log_course``) again and again.

Each repetition has names of tasks, ids and times of its own. The planner has answered the course once, so that what the
log says is as real as the course; the positions in its plans' evidence are not, and nothing decides these plans again.
The last event is of the present, so that a page that shows the last hour has something to show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.log_course import SMALL, START, STEP, Cluster, Course, write_rows
from shared.events.union import Event, Recorded
from shared.log.base import FIRST_HASH
from shared.log.chain import row_hash
from shared.log.log import recorded
from shared.log.scan import utc_text
from shared.log.schema import COLUMNS, StoredRow

PART = 20_000
"""Events of the course: ten seconds of the planner's time for a small cluster, two minutes for a large one."""

_VARIABLE = re.compile(
    r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z"
    r'|task-\d{6}|"p\d+)'
)
"""What each repetition has of its own: an id, a time, a task's name, or (behind its quote) a plan's."""


class _Text:
    """A text of the course, with what changes in each repetition."""

    def __init__(self, text: str) -> None:
        self._parts = _VARIABLE.split(text)  # every other one is variable

    def repeated(self, number: int, later: timedelta) -> str:
        parts = list(self._parts)
        for index in range(1, len(parts), 2):
            parts[index] = _changed(parts[index], number, later)
        return "".join(parts)


def _changed(found: str, number: int, later: timedelta) -> str:
    if found.startswith(("task-", '"p')):
        return f"{found}-{number}"
    if found.endswith("Z"):
        return f"{(datetime.fromisoformat(found) + later).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"
    return f"{found[:-4]}{int(found[-4:], 16) ^ number:04x}"


def write(path: Path, events: int) -> int:
    """Write a log of at least so many events; return how many it has."""
    total, _ = write_and_hold_back(path, events, 0, SMALL)
    return total


def write_and_hold_back(path: Path, events: int, held_back: int, cluster: Cluster) -> tuple[int, list[Event]]:
    """Write a log of at least so many events; return how many it has, and those that come next.

    Args:
        path: of the log.
        events: how many the log and the events held back have together, at least.
        held_back: how many events to return in place of writing them.
        cluster: of the course.
    """
    ended = list(Course(min(PART, events), ends=True, cluster=cluster).records())
    repetitions = max(1, -(-(events - PART - held_back) // len(ended)) + 1)
    # The last one goes on: tasks train, and perhaps a node is away.
    lasting = list(Course(min(PART, events) + held_back, cluster=cluster).records())
    total = (repetitions - 1) * len(ended) + len(lasting) - held_back
    start = datetime.now(UTC) - total * STEP
    rows = _rows(ended, lasting, repetitions, start)
    write_rows(path, islice(rows, total))
    return total, [recorded(StoredRow(*row)).event for row in rows]


def _rows(ended: list[Recorded], lasting: list[Recorded], repetitions: int, start: datetime) -> Iterator[list[Any]]:
    previous_hash, versions, position = FIRST_HASH, dict[str, int](), 0
    for number, part in enumerate([_texts(ended)] * (repetitions - 1) + [_texts(lasting)]):
        later = start + position * STEP - START
        for event_id, stream, data, kind, schema_version in part:
            position += 1
            name = stream.repeated(number, later)
            versions[name] = versions.get(name, 0) + 1
            at = utc_text(start + position * STEP)
            row = {
                "position": position,
                "event_id": event_id.repeated(number, later),
                "stream": name,
                "stream_version": versions[name],
                "type": kind,
                "schema_version": schema_version,
                "occurred_at": at,
                "recorded_at": at,
                "data": data.repeated(number, later),
                "previous_hash": previous_hash,
            }
            row["hash"] = previous_hash = row_hash(row)
            yield [row[name] for name in COLUMNS]


def _texts(records: list[Recorded]) -> list[tuple[_Text, _Text, _Text, str, int]]:
    events = [record.event for record in records]
    return [
        (_Text(event.event_id), _Text(event.stream), _Text(event.canonical()), event.type, event.schema_version)
        for event in events
    ]
