"""The core of every service: the inputs and the effect that all have, and the fold of the log. Pure.

A service's core is two functions, without clock, random source or I/O:

    evolve(state, event, at) -> state             after one event of the log
    decide(state, input, at) -> state, effects    after one input; an event of the log has been folded by then

``StateFold`` is the rule by which a service's own events enter its state (docs/architecture.md, "Folding and
deciding"). ``shared.service.runner`` drives a live service with it; replay and the simulator use it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from shared.events.union import Event, EventBase, Recorded

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Logged:
    """Input: a record of the log that came after the start."""

    record: Recorded


@dataclass(frozen=True, slots=True)
class Started:
    """Input: the end of what the log had at the start. From now on the service decides."""


@dataclass(frozen=True, slots=True)
class Append:
    """Effect: append these events, which ``decide`` has folded into the state already."""

    events: Sequence[Event]


Evolve = Callable[[S, EventBase, datetime], S]


class StateFold(Generic[S]):
    """A state, advanced record by record, into which each event is folded once.

    An event that the service has decided is in the state from then on. The log delivers it later, and it is skipped
    then.

    Args:
        evolve: folds an event into the state as of a time; it may change the state in place.
        state: to start from.
    """

    def __init__(self, evolve: Evolve[S], state: S) -> None:
        self.state = state
        self._evolve = evolve
        self._own: set[str] = set()
        """Ids of events that were folded when they were decided, and that the log has not delivered yet."""

    @property
    def is_delivered(self) -> bool:
        """Whether the state has nothing from behind the record that was taken last: no answer is still to come."""
        return not self._own

    @property
    def undelivered(self) -> Set[str]:
        """Ids of the events that were folded, and that the log has not delivered yet."""
        return self._own

    def take(self, record: Recorded) -> bool:
        """Fold a record; return False if it is an event that was folded when it was decided, which is skipped once."""
        if record.event.event_id in self._own:
            self._own.remove(record.event.event_id)
            return False
        self.state = self._evolve(self.state, record.event, record.recorded_at)
        return True

    def answer(self, cause: Recorded, events: Iterable[Event]) -> None:
        """Fold the answer to the record that was taken last, as of the time at which that record was logged."""
        for event in events:
            self._own.add(event.event_id)
            self.state = self._evolve(self.state, event, cause.recorded_at)

    def decided(self, state: S, effects: Iterable[object]) -> None:
        """Take the state that a decision has led to, in which the events of its effects are folded."""
        self.state = state
        self._own.update(event.event_id for each in effects if isinstance(each, Append) for event in each.events)
