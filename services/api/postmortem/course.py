"""The records of a page's course. Reads the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from shared.errors import Archived
from shared.events.union import Recorded
from shared.log.log import EventLog

MOST_RECORDS = 20_000
"""Records that are looked through behind the fault: on a busy cluster, hours. A course that lasts longer is cut, and
the page says so."""

PAGE = 1000
"""Records that are read at a time."""

_LATE = timedelta(seconds=30)
"""How much later than the end of its last phase a record of an incident may come: a report that waited for the bus."""


def course(
    log: EventLog,
    first: int,
    ends: datetime | None,
    types: Sequence[str],
    belongs: Callable[[Recorded], bool],
    left_out: list[str],
) -> list[Recorded]:
    """Return the records of a course, in the order of the log.

    Args:
        log: is read.
        first: position of the first record.
        ends: when the last phase ended; None: it goes on.
        types: of the records.
        belongs: whether a record of these types is part of the course.
        left_out: gets what the log does not have any more, in words.
    """
    after, read, records = first - 1, 0, list[Recorded]()
    while read < MOST_RECORDS:
        try:
            page = log.read(after=after, limit=PAGE, types=types)
        except Archived as err:
            left_out.append(f"the time line: {err.detail}")
            return records
        records += [record for record in page if belongs(record)]
        read += len(page)
        if len(page) < PAGE or (ends is not None and page[-1].recorded_at > ends + _LATE):
            return records
        after = page[-1].position
    left_out.append(f"what happened more than {MOST_RECORDS} records behind the fault")
    return records
