"""The whole log in one pass: each row is checked and read once, and nothing ends the pass but the database.

Services read by ``EventLog.read``, where an event that is not known, or that is damaged, is an error. A program that
examines a log (``unicron replay``) goes on behind such an event and says what is wrong or was skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from shared.errors import NewerVersion, OlderVersion, UnicronError
from shared.events.union import Event, Recorded, parsed
from shared.log.base import START, Base
from shared.log.chain import ChainCheck
from shared.log.schema import StoredRow
from shared.log.unreadable import Skipped, known_part, skipped, unreadable

CHUNK = 32
"""Number of rows that are checked, then parsed, then compared, each step for all of them: so the code of a step and the
rows stay in the processor's caches. Row by row, ``benchmarks/log.py`` reads and folds a quarter slower."""


_TIME_LENGTH = len("2024-01-01T00:00:00.000000+00:00")


class Row(NamedTuple):
    """A row of a scan.

    ``problem``: what is wrong with the row, in words; empty if nothing is. ``skipped``: what a newer version of the
    program wrote there. ``record``: the event as far as it is known here; None if it cannot be read.
    """

    position: int
    hash: str
    recorded_at: str
    record: Recorded | None
    problem: str
    skipped: Skipped | None


class Scan:
    """One pass over rows, in order.

    ``check``: the state of the chain's check, which is up to ``CHUNK`` rows ahead of what ``rows`` has yielded.

    Args:
        base: the place behind which the first row lies.
    """

    def __init__(self, base: Base = START) -> None:
        self.check = ChainCheck(base)

    def rows(self, stored: Iterable[StoredRow]) -> Iterator[Row]:
        """Check and read the next rows of the pass.

        An error of ``stored`` is raised behind the rows that came before it.
        """
        for chunk in _chunks(stored):
            yield from self._chunk(chunk)

    def _chunk(self, chunk: list[StoredRow]) -> list[Row]:
        problems = [self.check.next(row) for row in chunk]
        read = [_read(row, problem) for row, problem in zip(chunk, problems, strict=True)]
        return [self._row(*each) for each in zip(chunk, problems, read, strict=True)]

    def _row(self, row: StoredRow, problem: str, read: tuple[Event | None, Skipped | None, str]) -> Row:
        """Return a row whose place in the chain was checked and whose event was read."""
        event, unknown, defect = read
        if event is not None and not defect:
            defect = _contradiction(row, event)
        problem = problem or defect
        record = None
        if event is not None:
            try:
                record = record_of(row, event)
            except (TypeError, ValueError):
                problem = problem or f"position {row.position}: recorded_at is no time"
        if problem:
            self.check.broken()
        self.check.intact(row.position, row.hash)
        return Row(row.position, row.hash, row.recorded_at, record, problem, unknown)


def _chunks(stored: Iterable[StoredRow]) -> Iterator[list[StoredRow]]:
    rows = iter(stored)
    while True:
        chunk: list[StoredRow] = []
        try:
            chunk.extend(itertools.islice(rows, CHUNK))  # the error comes behind the rows before it
        except UnicronError:
            yield chunk
            raise
        if not chunk:
            return
        yield chunk


def record_of(row: StoredRow, event: Event) -> Recorded:
    """Return the record of a row whose event has been read.

    Raises:
        ValueError: ``recorded_at`` is no time.
        TypeError: it is no text.
    """
    return Recorded(
        position=row.position,
        stream=row.stream,
        stream_version=row.stream_version,
        recorded_at=datetime.fromisoformat(row.recorded_at),
        event=event,
        previous_hash=row.previous_hash,
        hash=row.hash,
    )


def utc_text(moment: datetime) -> str:
    """Return ISO 8601 text in UTC with microseconds: of fixed width, so that the order of texts is that of times."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _read(row: StoredRow, problem: str) -> tuple[Event | None, Skipped | None, str]:
    """Return the event as far as it is known here, what was skipped of it, and why it cannot be read.

    Raises:
        OlderVersion: an older version wrote the log. A row with a ``problem`` in its chain says nothing of the others.
    """
    try:
        return parsed(row.type, row.data), None, ""
    except (ValidationError, ValueError, TypeError) as err:
        error = unreadable(row.position, row.data, err)
        if isinstance(error, OlderVersion) and not problem:
            raise error from err
        if not isinstance(error, NewerVersion):
            return None, None, error.detail
        known = known_part(row.data, err)
        return known, skipped(error, whole=known is None), ""


def _contradiction(row: StoredRow, event: Event) -> str:
    """Return which column contradicts the event; empty if none does.

    The stored JSON is not compared with the event's: an event of an older version of this program may lack fields that
    have a default today.
    """
    if event.occurred_at.tzinfo is None:
        return f"position {row.position}: occurred_at has no time zone"
    if row.event_id != event.event_id:
        return f"position {row.position}: column event_id contradicts the event"
    if row.stream != event.stream:
        return f"position {row.position}: column stream contradicts the event"
    if row.type != event.type:
        return f"position {row.position}: column type contradicts the event"
    if row.schema_version != _stored_version(row, event):
        return f"position {row.position}: column schema_version contradicts the event"
    if not _is_time(row.occurred_at, event.occurred_at):
        return f"position {row.position}: column occurred_at contradicts the event"
    return ""


def _stored_version(row: StoredRow, event: Event) -> int:
    """Return the schema version of the event as it is stored; the one that was read has the present one."""
    newest = event.schema_version
    if row.schema_version == newest and f'"schema_version":{newest}' in row.data:
        return newest  # the stored text repeats the column: it need not be parsed once more
    return int(from_json(row.data).get("schema_version", newest))


def _is_time(text: object, moment: datetime) -> bool:
    """Return whether a text is what ``utc_text`` makes of a moment; cheaper than to make it."""
    if not isinstance(text, str) or len(text) != _TIME_LENGTH or text[10] != "T" or not text.endswith("+00:00"):
        return False
    return datetime.fromisoformat(text) == moment
