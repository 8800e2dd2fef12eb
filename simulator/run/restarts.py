"""Restarts that an incident has made necessary, though no plan for the incident makes them. Pure.

A task that an incident has left without enough workers waits. It starts again when a node comes back or a task ends,
by a plan that answers no incident; so the cost report has that start, and the steps that are computed again behind it,
as planned (``shared.costs.claims``). Here both belong to the incident: without it the task would have trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shared.costs.charges import Charge
from shared.costs.claims import Part, recompute_start
from shared.events.union import Event, PlanDecided, StateMoved, TaskSubmitted
from shared.views.documents import PlanView

_ROUNDING_S = 1e-3
"""Times of the ledger are exact to microseconds."""


class Restarts:
    """The plans that start tasks again which an incident has made wait."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._plans: dict[str, list[str]] = {}
        """By task, the plans that start it again."""

    def fold(self, event: Event) -> None:
        """Fold an event."""
        match event:
            case PlanDecided():
                self._decided(event)
            case StateMoved() if event.complete and event.plan in self._plans.get(event.task, ())[-1:]:
                self._waiting.discard(event.task)
            case TaskSubmitted():
                self._waiting.discard(event.task)

    def _decided(self, plan: PlanDecided) -> None:
        for change in plan.changes:
            if change.action == "pause" and plan.incident is not None:
                self._waiting.add(change.task)
            elif change.action in ("stop", "end"):
                self._waiting.discard(change.task)
            elif change.action == "move" and plan.incident is None and change.task in self._waiting:
                self._plans.setdefault(change.task, []).append(plan.plan)

    def part_of(self, charge: Charge, plans: Mapping[str, PlanView]) -> Part:
        """Return what a charge belongs to: its own part, or that of the incident for which its task had waited.

        Args:
            charge: of the ledger.
            plans: by id, at least those that the ledger was made of.
        """
        claim = charge.claim
        if claim.part is not Part.PLANNED:
            return claim.part
        for plan in self._plans.get(claim.task, ()):
            impact = plans[plan].impacts.get(claim.task) if plan in plans else None
            if impact is None:
                continue
            end = impact.until if impact.restored_at is not None else impact.closed_at
            end_s = end.timestamp() if end is not None else math.inf
            if impact.planned_at.timestamp() - _ROUNDING_S <= claim.start_s < end_s:
                again = recompute_start(impact)
                computed = again is not None and claim.start_s >= again.timestamp() - _ROUNDING_S
                return Part.RECOMPUTE if computed else Part.TRANSITION
        return claim.part
