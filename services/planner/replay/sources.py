"""Sources of replay: a database, read in passes, or records in memory; and how far a pass has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import takewhile
from typing import NamedTuple, Protocol

from pydantic_core import from_json

from services.planner.decide import SERVICE
from services.planner.replay.invariants import may_be_answered
from shared.errors import Corrupt
from shared.events.union import PlanDecided, Recorded, TaskStopped, derived_id
from shared.log.anchors import Defect
from shared.log.base import FIRST_HASH, START, Base
from shared.log.log import EventLog
from shared.log.scan import Row, Scan
from shared.log.schema import StoredRow

_ANSWERS = PlanDecided, TaskStopped

ANSWER_TYPES = tuple(str(kind.model_fields["type"].default) for kind in _ANSWERS)
"""Types of the events with which the planner answers."""

_EVERY = 64
"""Rows between two reports: a report takes microseconds, to verify as many rows milliseconds."""


class Answer(NamedTuple):
    """An event of a type with which the planner answers. ``decider``: the plan's decider; None for other events."""

    position: int
    event_id: str
    decider: int | None


class Source(Protocol):
    """A log that can be read as often as wanted."""

    def base(self) -> Base:
        """Return the place behind which the rows begin."""
        ...

    def answers(self) -> Iterator[Answer]:
        """Yield the events of the types with which the planner answers, in order."""
        ...

    def rows(self, scan: Scan) -> Iterator[Row]:
        """Yield every row, checked by ``scan``."""
        ...

    def defects(self) -> list[Defect]:
        """Return what is wrong with the table and not with one of its rows."""
        ...

    def as_it_is(self) -> Source:
        """Return the log as it is now, without what is appended later."""
        ...


class RecordsSource:
    """Records in memory. There is no table or chain to check: both were checked before, or do not exist."""

    def __init__(self, records: list[Recorded], *, chain_ok: bool) -> None:
        self._records = records
        self._chain_ok = chain_ok

    def base(self) -> Base:
        """Return the start of the log."""
        return START

    def answers(self) -> Iterator[Answer]:
        """Yield the events of the types with which the planner answers, in order."""
        for record in self._records:
            event = record.event
            if isinstance(event, _ANSWERS):
                decider = event.decider if isinstance(event, PlanDecided) else None
                yield Answer(record.position, event.event_id, decider)

    def rows(self, scan: Scan) -> Iterator[Row]:
        """Yield every record as a row without a defect."""
        if not self._chain_ok:
            scan.check.broken()
        for record in self._records:
            scan.check.intact(record.position, record.hash or FIRST_HASH)
            yield Row(record.position, record.hash, record.recorded_at.isoformat(), record, "", None)

    def as_it_is(self) -> Source:
        """Return the records."""
        return self

    def defects(self) -> list[Defect]:
        """Return the event ids that several records have."""
        seen: dict[str, int] = {}
        found = []
        for record in self._records:
            first = seen.setdefault(record.event.event_id, record.position)
            if first != record.position:
                found.append(doubled(record.event.event_id, first, record.position))
        return found


class LogSource:
    """A log in a database: its table. What was archived of it is not read; ``segments`` reads both.

    Args:
        opened: returns the log, opened anew for each pass, which closes it.
        last: position of the last row that counts; None: all that are there.
    """

    def __init__(self, opened: Callable[[], EventLog], last: int | None = None) -> None:
        self._opened = opened
        self.last = last

    def base(self) -> Base:
        """Return the place behind which the table begins."""
        with closing(self._opened()) as log:
            return log.base

    def answers(self) -> Iterator[Answer]:
        """Yield the events of the types with which the planner answers, in order."""
        with closing(self._opened()) as log:
            for position, event_id, data in log.raw(*ANSWER_TYPES, after=log.base.position):
                if self.last is not None and position > self.last:
                    return
                if (answer := answer_of(position, event_id, data)) is not None:
                    yield answer

    def rows(self, scan: Scan) -> Iterator[Row]:
        """Yield every row."""
        with closing(self._opened()) as log, closing(log.rows()) as stored:
            yield from scan.rows(takewhile(self._counts, stored) if self.last is not None else stored)

    def _counts(self, row: StoredRow) -> bool:
        return self.last is None or not isinstance(row.position, int) or row.position <= self.last

    def as_it_is(self) -> LogSource:
        """Return the log as it is now, without what is appended later."""
        try:
            with closing(self._opened()) as log:
                return LogSource(self._opened, log.last_position())
        except (Corrupt, ValueError):
            return self  # the pass over the rows says where the defect is

    def defects(self) -> list[Defect]:
        """Return the guards that the table lacks, and the event ids that several rows have."""
        with closing(self._opened()) as log:
            try:
                found = table_defects(log)
                return found + [doubled(*places) for places in log.doubled_ids()]
            except Corrupt as err:
                return [Defect(0, err.detail)]


def table_defects(log: EventLog) -> list[Defect]:
    """Return the guards that a log's table lacks, and what is wrong with the log's base."""
    found = [Defect(0, f"the table lacks {guard}") for guard in log.lacking_guards()]
    if problem := log.base_problem():
        found.append(Defect(log.base.position, problem))
    return found


def decider_of(data: str) -> int | None:
    """Return the decider of a stored plan; None if the event is no plan, or names no decider.

    Raises:
        TypeError: it is no text.
        ValueError: it is not an event.
    """
    event = from_json(data)
    if not isinstance(event, dict):
        raise ValueError("not an event")
    decider = event.get("decider") if event.get("type") == "plan.decided" else None
    return decider if isinstance(decider, int) and decider >= 1 else None


def answer_of(position: int, event_id: str, data: str) -> Answer | None:
    """Return the answer in a row of one of ``ANSWER_TYPES``; None if its text is no event, which others report."""
    try:
        return Answer(position, event_id, decider_of(data))
    except (TypeError, ValueError):
        return None


def doubled(event_id: str, first: int, last: int) -> Defect:
    """Return the defect that an event id was recorded twice."""
    return Defect(last, f"position {last}: event id {event_id} is that of position {first} too")


class AnsweredRows:
    """The rows of a log in order, with a look ahead to the answer of each cause, which the log has a little later.

    Args:
        rows: the log's, in order.
        answers: the log's.
    """

    def __init__(self, rows: Iterable[Row], answers: Iterable[Answer]) -> None:
        self._rows = iter(rows)
        self._positions: dict[str, int] = {answer.event_id: answer.position for answer in answers}
        self._ahead: deque[Row] = deque()
        self._read = 0
        self._unclaimed: dict[str, Recorded] = {}
        """Answers that were read and that no cause has called for yet."""

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows."""
        while self._ahead or self._more():
            yield self._ahead.popleft()

    def answers_to(self, cause: Recorded) -> list[Recorded]:
        """Return the planner's recorded answer to a cause, in the order of its events; empty if there is none."""
        found: list[Recorded] = []
        if not may_be_answered(cause.event):
            return found
        while (record := self._find(derived_id(cause.event.event_id, SERVICE, len(found)))) is not None:
            found.append(record)
        return found

    def unclaimed(self) -> list[Recorded]:
        """Return the plans that no cause has called for."""
        return [record for record in self._unclaimed.values() if isinstance(record.event, PlanDecided)]

    def _find(self, event_id: str) -> Recorded | None:
        position = self._positions.get(event_id)
        if position is None:
            return None
        while event_id not in self._unclaimed and self._read < position and self._more():
            pass
        return self._unclaimed.pop(event_id, None)

    def _more(self) -> bool:
        """Read one more row; return False at the end."""
        row = next(self._rows, None)
        if row is None:
            return False
        self._ahead.append(row)
        self._read = row.position
        if row.record is not None and isinstance(row.record.event, _ANSWERS):
            self._unclaimed[row.record.event.event_id] = row.record
        return True


class WatchedSource:
    """A log whose passes are watched. Passes of other processes are not: they read ``as_it_is``.

    Args:
        source: the log.
        seen: called now and then with the number of rows that the present pass has yielded.
    """

    def __init__(self, source: Source, seen: Callable[[int], None]) -> None:
        self._source, self._seen = source, seen

    def base(self) -> Base:
        """Return the place behind which the rows begin."""
        return self._source.base()

    def answers(self) -> Iterator[Answer]:
        """Yield the events of the types with which the planner answers, in order."""
        return self._source.answers()

    def rows(self, scan: Scan) -> Iterator[Row]:
        """Yield every row, checked by ``scan``."""
        for number, row in enumerate(self._source.rows(scan), 1):
            if number % _EVERY == 0:
                self._seen(number)
            yield row

    def defects(self) -> list[Defect]:
        """Return what is wrong with the table and not with one of its rows."""
        return self._source.defects()

    def as_it_is(self) -> Source:
        """Return the log as it is now, without what is appended later."""
        return self._source.as_it_is()
