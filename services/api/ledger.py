"""The ledger: every worker-second from a node's first join until it is removed or drained, charged once. Pure.

docs/costs.md has the definition of each kind. Nothing here reads a clock: ``as_of`` stands in for times to come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from services.api.charges import Charge, Interval, settle, total
from services.api.claims import (
    Claim,
    IncidentTimes,
    Part,
    failure_claims,
    planned_claims,
    start_claims,
    training_claims,
)
from services.api.cost_models import IncidentCost
from services.api.span_claims import (
    NODE_SPANS,
    Window,
    allocated_intervals,
    lost_claims,
    shortfall_claims,
    undetected_claims,
    unused_claims,
)
from services.api.views import IncidentView, PlanView, SpanView

CATEGORIES = {
    Part.DETECTION: "detection",
    Part.TRANSITION: "transition_incident",
    Part.PLANNED: "transition_planned",
    Part.RECOMPUTE: "recompute",
    Part.LOST: "lost",
    Part.SUB_HEALTHY: "sub_healthy",
    Part.UNSCHEDULED: "unscheduled",
    Part.IDLE: "idle",
    Part.TRAINING: "useful",
}
"""The kinds of time by the part of a claim, in the order in which they apply."""


@dataclass(frozen=True)
class History:
    """What the ledger is made of: views of all time."""

    plans: Sequence[PlanView]
    incidents: Sequence[IncidentView]
    spans: Sequence[SpanView]

    def present(self, at: datetime) -> datetime:
        """Return a present time that is not before what the log records: its clock may be a little ahead of ours."""
        return max([at, *(span.end or span.start for span in self.spans)])


def all_claims(history: History, window: Window, as_of: datetime) -> list[Claim]:
    """Return every claim, in the order in which seconds are charged: that of the kinds (``CATEGORIES``).

    Within a kind the oldest incident comes first. A worker that an incident has taken from a task is sub-healthy also
    while it trains for a task of a lower weight; so training and sub-healthy time come by weight. What no claim of a
    plan or an incident covers is unscheduled or idle.
    """
    spans = history.spans
    incidents = sorted(history.incidents, key=lambda view: view.position)
    by_part: dict[Part, list[Claim]] = {part: [] for part in Part}
    weighted: list[tuple[float, Claim]] = []
    starts: list[Claim] = []
    for weight, claim, starting in _plan_claims(history.plans, incidents, as_of):
        if starting:
            starts.append(claim)
        elif claim.part in {Part.TRAINING, Part.SUB_HEALTHY}:
            weighted.append((weight, claim))
        else:
            by_part[claim.part].append(claim)
    for claim in _while_not_training(starts, [claim for _, claim in weighted if claim.part is Part.TRAINING]):
        by_part[claim.part].append(claim)
    weighted += shortfall_claims(spans, window)
    weighted.sort(key=lambda pair: (-pair[0], pair[1].part is not Part.TRAINING))
    detected = {incident.id: incident.detected_at for incident in incidents}
    return [
        *by_part[Part.DETECTION],
        *undetected_claims(spans, detected, window),
        *by_part[Part.TRANSITION],
        *by_part[Part.PLANNED],
        *by_part[Part.RECOMPUTE],
        *lost_claims(spans, window),
        *(claim for _, claim in weighted),
        *unused_claims(spans, window),
    ]


def _plan_claims(
    plans: Sequence[PlanView], incidents: Sequence[IncidentView], as_of: datetime
) -> Iterator[tuple[float, Claim, bool]]:
    """Yield each claim of a plan with the weight of its task, and whether it is on the start of a new worker."""
    by_id = {plan.id: plan for plan in plans}
    charged: set[tuple[str, str]] = set()
    for incident in incidents:
        times = IncidentTimes(incident.id, incident.occurred_at, incident.detected_at)
        answered: set[str] = set()
        for plan in sorted((by_id[name] for name in incident.plans if name in by_id), key=lambda p: p.position):
            for task, impact in plan.impacts.items():
                if plan.incident != incident.id and task not in answered:
                    continue  # another incident's plan counts only for tasks that this incident's plans changed
                for claim in failure_claims(impact, times, first=task not in answered, as_of=as_of):
                    yield impact.weight, claim, False
                answered.add(task)
                if (plan.id, task) not in charged:
                    charged.add((plan.id, task))
                    for claim in start_claims(impact, incident.id, as_of):
                        yield impact.weight, claim, True
    for plan in sorted(plans, key=lambda view: view.position):
        for task, impact in plan.impacts.items():
            for claim in training_claims(impact, as_of):
                yield impact.weight, claim, False
            if (plan.id, task) not in charged:
                cause = plan.trigger.value
                for claim in planned_claims(impact, as_of, cause):
                    yield impact.weight, claim, False
                for claim in start_claims(impact, "", as_of, cause):
                    yield impact.weight, claim, True


def _while_not_training(starts: Iterable[Claim], training: Iterable[Claim]) -> Iterator[Claim]:
    """Yield the claims on starts as far as the workers do not train for another task meanwhile."""
    for charge in settle([*training, *starts]):
        if charge.claim.part is not Part.TRAINING:
            for start_s, end_s in charge.intervals:
                yield replace(charge.claim, start_s=start_s, end_s=end_s)


@dataclass(frozen=True)
class Ledger:
    """All charges in a window, and what they are to add up to.

    ``allocated``: when each worker was allocated. ``hardware``: the newest kind of each node. ``kinds``: of incidents,
    by id.
    """

    charges: list[Charge]
    price_per_worker_hour: float
    allocated: Mapping[str, Sequence[Interval]]
    hardware: Mapping[str, str]
    kinds: Mapping[str, str]

    def incident(self, incident: str) -> IncidentCost:
        """Return the cost of one incident."""
        return self._cost(c for c in self.charges if c.claim.incident == incident)

    def by_incident(self) -> dict[str, IncidentCost]:
        """Return the cost of every incident that has one."""
        return {name: self._cost(charges) for name, charges in self.group(_incident).items() if name}

    def group(self, key: Callable[[Charge], str]) -> dict[str, list[Charge]]:
        """Return the charges that are not empty, by a key."""
        groups: dict[str, list[Charge]] = {}
        for charge in self.charges:
            if charge.intervals:
                groups.setdefault(key(charge), []).append(charge)
        return groups

    def dimensions(self) -> dict[str, Callable[[Charge], str]]:
        """Return the keys by which charges are broken down; the key is empty where it does not apply."""
        return {
            "task": lambda charge: charge.claim.task,
            "node": _node,
            "hardware": lambda charge: self.hardware.get(_node(charge), ""),
            "cause": lambda charge: self.kinds.get(charge.claim.incident, charge.claim.cause),
            "incident": _incident,
        }

    def _cost(self, charges: Iterable[Charge]) -> IncidentCost:
        return incident_cost(charges, self.price_per_worker_hour)


def _incident(charge: Charge) -> str:
    return charge.claim.incident


def _node(charge: Charge) -> str:
    return charge.claim.worker.rpartition("/")[0]


def incident_cost(charges: Iterable[Charge], price: float) -> IncidentCost:
    """Return the failure parts of charges as the interface shows them."""
    cost = total(charges, price)
    return IncidentCost(
        detection_worker_s=cost.detection_worker_s,
        transition_worker_s=cost.transition_worker_s,
        recompute_worker_s=cost.recompute_worker_s,
        sub_healthy_worker_s=cost.sub_healthy_worker_s,
        lost_worker_s=cost.lost_worker_s,
        lost_flop=cost.lost_flop,
        money=cost.money,
        failure_money=cost.money,
    )


def ledger(history: History, price_per_worker_hour: float, as_of: datetime, window: Window | None = None) -> Ledger:
    """Settle everything up to ``as_of``. ``window``: what to charge; None: all time up to then."""
    as_of = history.present(as_of)
    window = window or Window.of(None, as_of)
    allocated = allocated_intervals(history.spans, window)
    return Ledger(
        charges=settle(all_claims(history, window, as_of), allocated),
        price_per_worker_hour=price_per_worker_hour,
        allocated=allocated,
        hardware={span.node: span.hardware for span in history.spans if span.kind in NODE_SPANS},
        kinds={incident.id: incident.kind.value for incident in history.incidents},
    )


def categories(charges: Iterable[Charge], start_s: float = -math.inf, end_s: float = math.inf) -> dict[str, float]:
    """Return the worker-seconds of every kind between two times."""
    seconds = dict.fromkeys(CATEGORIES.values(), 0.0)
    for charge in charges:
        seconds[CATEGORIES[charge.claim.part]] += charge.between(start_s, end_s)
    return seconds
