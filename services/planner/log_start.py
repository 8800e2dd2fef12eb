"""What the log has when the planner's service starts: end, newest decider and parameters, and where the answers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.planner.decide import DECIDER
from services.planner.replay.sources import ANSWER_TYPES, answer_of
from shared.errors import Conflict
from shared.events.union import ClusterConfigured, Recorded
from shared.log.log import EventLog

_CONFIGURED = str(ClusterConfigured.model_fields["type"].default)


class Read(Protocol):
    """Reads records of the log: ``Journal.read``."""

    async def __call__(self, *, after: int, limit: int, types: Sequence[str] = ()) -> list[Recorded]:
        """Return the records."""
        ...


class LogStart(NamedTuple):
    """Positions and ids that the log has when the service starts.

    ``last``: position of the last event. The other fields say what the log has behind the position from which the
    service folds it. ``configured``: position of the last parameters; 0: none. ``decider``: the newest; 0: no plan.
    ``answers``: position of each event of a type with which the planner answers, by its id. ``older``: ids of the plans
    of older deciders.
    """

    last: int
    configured: int
    decider: int
    answers: dict[str, int]
    older: frozenset[str] = frozenset()


def start_of(log: EventLog, after: int = 0) -> LogStart:
    """Return what the log has.

    Args:
        log: the log.
        after: position from which the service folds it.
    """
    last, decider = log.last_position(), 0
    answers: dict[str, int] = {}
    older: set[str] = set()
    for position, event_id, data in log.raw(*ANSWER_TYPES, after=after):
        answers[event_id] = position
        if (answer := answer_of(position, event_id, data)) is not None:  # the fold reports a damaged row
            decider = max(decider, answer.decider or 0)
            if answer.decider is not None and answer.decider < DECIDER:
                older.add(event_id)
    configured = max((position for position, _, _ in log.raw(_CONFIGURED, after=after)), default=0)
    return LogStart(last, configured, decider, answers, frozenset(older))


def check_decider(newest: int) -> None:
    """Refuse a log in which a newer planner has decided: later plans of this planner could never be verified.

    Args:
        newest: the newest decider in the log.

    Raises:
        Conflict: it is above this program's.
    """
    if newest > DECIDER:
        raise Conflict(f"the log has plans of decider {newest}, this program is decider {DECIDER}: use a newer version")


async def last_parameters(read: Read, start: LogStart) -> ClusterConfigured | None:
    """Return the parameters that were logged last; None if none were."""
    for record in await read(after=start.configured - 1, limit=1) if start.configured else ():
        if isinstance(record.event, ClusterConfigured):
            return record.event
    return None
