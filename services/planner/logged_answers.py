"""The answers that the log has when the planner's service starts: folded behind their causes, not decided again.

An answer comes a little behind its cause in the log, so the service looks ahead for it. It keeps the answers' places,
and the few answers that it has read ahead: its memory does not hold the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.planner.decide import DECIDER, SERVICE
from services.planner.invariants import TRIGGERS
from services.planner.sources import decider_of
from shared.errors import Conflict
from shared.events import ClusterConfigured, Recorded, derived_id
from shared.log.log import EventLog

PLAN, STOPPED, CONFIGURED = "plan.decided", "task.stopped", "cluster.configured"

PAGE = 64
"""Answers that are read at once: a query costs as much as to parse a few of them."""


class Read(Protocol):
    """Reads records of the log: ``Journal.read``."""

    async def __call__(self, *, after: int, limit: int, types: Sequence[str] = ()) -> list[Recorded]:
        """Return the records."""
        ...


class Start(NamedTuple):
    """What a log has when the service starts.

    ``last``: position of the last event. ``configured``: position of the last parameters; 0: none. ``decider``: the
    newest; 0: no plan. ``answers``: position of each event of a type with which the planner answers, by its id.
    """

    last: int
    configured: int
    decider: int
    answers: dict[str, int]


def start_of(log: EventLog) -> Start:
    """Return what the log has."""
    last, decider = log.last_position(), 0
    answers = {event_id: position for position, event_id, _ in log.raw(STOPPED)}
    for position, event_id, data in log.raw(PLAN):
        answers[event_id] = position
        try:
            decider = max(decider, decider_of(data) or 0)
        except (TypeError, ValueError):
            continue  # damaged: the fold comes to it and says so
    configured = max((position for position, _, _ in log.raw(CONFIGURED)), default=0)
    return Start(last, configured, decider, answers)


def check_decider(newest: int) -> None:
    """Refuse a log in which a newer planner has decided: later plans of this planner could never be verified.

    Args:
        newest: the newest decider in the log.

    Raises:
        Conflict: it is above this program's.
    """
    if newest > DECIDER:
        raise Conflict(f"the log has plans of decider {newest}, this program is decider {DECIDER}: use a newer version")


async def last_parameters(read: Read, start: Start) -> ClusterConfigured | None:
    """Return the parameters that were logged last; None if none were. This process's time follows the log's."""
    await read(after=max(start.last - 1, 0), limit=1)
    for record in await read(after=start.configured - 1, limit=1) if start.configured else ():
        if isinstance(record.event, ClusterConfigured):
            return record.event
    return None


class LoggedAnswers:
    """The answers, each given to its cause once.

    Args:
        read: ``Journal.read``.
        positions: ``Start.answers``.
    """

    def __init__(self, read: Read, positions: dict[str, int]) -> None:
        self._read = read
        self._positions = positions
        self._ahead: dict[str, Recorded] = {}

    async def to(self, cause: Recorded) -> list[Recorded]:
        """Return the recorded answer to a cause, in the order of its events; empty if there is none.

        Raises:
            Corrupt: an answer cannot be read back.
            NewerVersion: a newer version of the program wrote it.
        """
        found: list[Recorded] = []
        while self._positions and type(cause.event) in TRIGGERS:
            event_id = derived_id(cause.event.event_id, SERVICE, len(found))
            position = self._positions.pop(event_id, None)
            if position is None:
                break
            if event_id not in self._ahead:
                page = await self._read(after=position - 1, limit=PAGE, types=(PLAN, STOPPED))
                ahead = {record.event.event_id: record for record in page}
                self._ahead |= {each: ahead[each] for each in ahead if each == event_id or each in self._positions}
            record = self._ahead.pop(event_id, None)
            if record is None:
                break  # the log has lost it since the start: the follower comes to that
            found.append(record)
        return found

    def forget(self) -> None:
        """Drop what no cause has called for: the log that was there at the start has been folded."""
        self._positions, self._ahead = {}, {}
