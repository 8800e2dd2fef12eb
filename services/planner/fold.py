"""Folding the log in log order, for the shell and for replay alike (docs/architecture.md, "Folding and deciding").

What was decided about an event is folded right after it, and skipped when the log delivers it later. So the state
behind the answer to event k is: every event up to k, and every answer to an event before k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.planner.core import SERVICE, decide, evolve
from services.planner.reconfigure import Solve
from services.planner.state import State
from shared.events import Event, PlanDecided, Recorded, TaskStopped, derived_id
from shared.planning.solver import solve_with_alternatives


class Fold:
    """A state that advances with the log."""

    def __init__(self, solve: Solve = solve_with_alternatives) -> None:
        """Start before the first event. ``solve``: the solver, or what answers as it would."""
        self.state = State()
        self._solve = solve
        self._folded: set[str] = set()

    def take(self, record: Recorded) -> bool:
        """Fold a record; return False if it is an answer that was folded already, right after its cause."""
        if record.event.event_id in self._folded:
            self._folded.remove(record.event.event_id)
            return False
        self.state = evolve(self.state, record.event, record.recorded_at)
        return True

    def decide(self, record: Recorded) -> list[Event]:
        """Return what follows from the record just taken."""
        return decide(self.state, record.event, record.recorded_at, self._solve)

    def answer(self, cause: Recorded, events: Sequence[Event]) -> None:
        """Fold what was decided about the record just taken."""
        for event in events:
            self._folded.add(event.event_id)
            self.state = evolve(self.state, event, cause.recorded_at)


def recorded_answers(records: Iterable[Recorded]) -> dict[str, Recorded]:
    """Return, by event id, the records that may be answers of the planner."""
    return {r.event.event_id: r for r in records if isinstance(r.event, PlanDecided | TaskStopped)}


def answers_to(cause: Recorded, answers: Mapping[str, Recorded]) -> list[Recorded]:
    """Return the planner's recorded answer to a cause, in the order of its events; empty if there is none."""
    found: list[Recorded] = []
    while (record := answers.get(derived_id(cause.event.event_id, SERVICE, len(found)))) is not None:
        found.append(record)
    return found
