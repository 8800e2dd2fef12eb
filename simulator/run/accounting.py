"""Accounting: the cost report's own projections and ledger, folded from the records of a run, in memory.

It differs from them in three things. What starts a task again that an incident has made wait belongs to failures
(``restarts``). A task that stands still for a fault which is not found, or only together with another one, does not
train (``stalls``). A task that pauses gives up all its workers, also those that finish the step which a fault has
broken; the views have these as its workers until it starts again.

The views are plain mappings in place of the tables of ``services.api.store.projection_store``. Time is settled a day at
a time, as the store does it, so that the claims of a long run are never in memory all at once.

Some restarts that an incident has made necessary are made by no plan for the incident. A task that an incident has left
without enough workers waits. It starts again when a node comes back or a task ends, by a plan that answers no incident;
so the cost report has that start, and the steps that are computed again behind it, as planned
(``shared.costs.claims``). Here both belong to the incident: without it the task would have trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from shared.costs.charges import Charge
from shared.costs.claim_times import plan_times, span_times
from shared.costs.claims import Part, recompute_start
from shared.costs.ledger import CATEGORIES, History, ledger
from shared.costs.report import allocated_worker_s
from shared.costs.service_levels import achieved_flop
from shared.costs.settlement import DAY_S
from shared.costs.span_claims import Window
from shared.events.plans import TaskChange
from shared.events.union import Event, PlanDecided, Recorded, StateMoved, TaskSubmitted
from shared.projections.evolve import evolve
from shared.views.documents import ClusterView, PlanView, SpanKind, SpanView, TaskView, Views
from simulator.run.agenda import START
from simulator.run.stalls import Stall

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


class Accounting:
    """The costs of a run."""

    def __init__(self) -> None:
        self._views = Views()
        self._restarts = Restarts()

    def fold(self, record: Recorded) -> None:
        """Fold a record."""
        evolve(self._views, _given_up(record))
        self._restarts.fold(record.event)

    def totals(self, until: datetime, stalls: Sequence[Stall] = ()) -> tuple[dict[str, float], float]:
        """Return the worker-seconds of each kind up to a time, and the allocated ones, which are counted apart.

        What the ledger takes for training in one of the ``stalls`` counts as detection.
        """
        return self.kinds(START, until, stalls), allocated_worker_s(self._views.nodes.values(), until)

    def kinds(self, since: datetime, until: datetime, stalls: Sequence[Stall] = ()) -> dict[str, float]:
        """Return the worker-seconds of each kind between two times."""
        kinds = dict.fromkeys(CATEGORIES.values(), 0.0)
        plans = sorted(((*plan_times(plan), plan) for plan in self._views.plans.values()), key=lambda each: each[:2])
        spans = [(*span_times(span), span) for span in self._views.spans.values() if span.kind is not SpanKind.PROGRESS]
        for window in _days(since.timestamp(), until.timestamp()):
            history = self._reaching(window, plans, spans)
            here = [stall for stall in stalls if stall.start_s < window.end_s and stall.end_s > window.start_s]
            for charge in ledger(history, until, window).charges:
                part = self._restarts.part_of(charge, self._views.plans)
                stalled_s = sum(stall.worker_s(charge) for stall in here) if part is Part.TRAINING else 0.0
                kinds[CATEGORIES[part]] += charge.worker_s - stalled_s
                kinds[CATEGORIES[Part.DETECTION]] += stalled_s
        return kinds

    @property
    def tasks(self) -> Mapping[str, TaskView]:
        """The tasks by name."""
        return self._views.tasks

    @property
    def cluster(self) -> ClusterView:
        """What money is counted by."""
        return self._views.cluster.get("cluster", ClusterView())

    def achieved_flop(self, until: datetime) -> float:
        """Return the weighted FLOP of the steps done, as the report has it."""
        window = Window.of(None, until)
        return achieved_flop(self._views.spans.values(), self._views.tasks, window, until.timestamp())

    def _reaching(
        self, window: Window, plans: list[tuple[float, float, PlanView]], spans: list[tuple[float, float, SpanView]]
    ) -> History:
        """Return what reaches into a window, with all plans of the incidents concerned (``store.slices``)."""
        views = self._views
        found = {p.id: p for start_s, end_s, p in plans if start_s < window.end_s and end_s > window.start_s}
        lasting = [s for start_s, end_s, s in spans if start_s < window.end_s and end_s > window.start_s]
        named = {incident for plan in found.values() for incident in plan.incidents}
        names = named | {span.incident for span in lasting if span.incident}
        incidents = [views.incidents[name] for name in names if name in views.incidents]
        answers = {plan for each in incidents if each.id in named for plan in each.plans}
        found |= {name: views.plans[name] for name in answers if name in views.plans}
        return History(
            plans=sorted(found.values(), key=lambda plan: plan.position),
            incidents=sorted(incidents, key=lambda incident: incident.position),
            spans=sorted(lasting, key=lambda span: (span.position, span.id)),
        )


def _given_up(record: Recorded) -> Recorded:
    """Return the record of a plan in which tasks that pause or stop keep no workers; any other as it is."""
    plan = record.event
    if not isinstance(plan, PlanDecided) or not any(map(_finishes_first, plan.changes)):
        return record
    changes = [c.model_copy(update={"interrupted": None}) if _finishes_first(c) else c for c in plan.changes]
    return record.model_copy(update={"event": plan.model_copy(update={"changes": changes})})


def _finishes_first(change: TaskChange) -> bool:
    return change.action in ("pause", "stop") and change.interrupted is not None


def _days(start_s: float, end_s: float) -> Iterator[Window]:
    low = start_s
    while low < end_s:
        yield Window(low, min(low + DAY_S, end_s))
        low += DAY_S
