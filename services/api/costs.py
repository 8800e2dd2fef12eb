"""The cost report: the charges of all plans (``services/api/charges.py``) by incident and by task. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from services.api.charges import Charge, Cost, money, settle, total, worker_s
from services.api.claims import (
    Claim,
    IncidentTimes,
    Part,
    failure_claims,
    planned_claims,
    start_claims,
    training_claims,
)
from services.api.models import Costs, CostTotals, IncidentCost, IncidentCostRow, SumCheck, TaskCost
from services.api.views import ClusterView, IncidentView, PlanView, TaskView

_SUM_TOLERANCE = 1e-6
"""Relative difference that rounding of float64 sums may leave between two orders of adding."""


def all_claims(plans: Sequence[PlanView], incidents: Sequence[IncidentView], as_of: datetime) -> list[Claim]:
    """Return every claim, in the order in which seconds are charged.

    Incidents come first, the oldest first (a second lost to two faults is charged to the earlier one); then planned
    moves; then training; then the start of new workers, which costs nothing while they still train for another task.
    """
    by_id = {plan.id: plan for plan in plans}
    claims: list[Claim] = []
    starts: list[Claim] = []
    charged: set[tuple[str, str]] = set()
    for incident in sorted(incidents, key=lambda view: view.position):
        times = IncidentTimes(incident.id, incident.occurred_at, incident.detected_at)
        answered: set[str] = set()
        for plan in sorted((by_id[name] for name in incident.plans if name in by_id), key=lambda p: p.position):
            for task, impact in plan.impacts.items():
                if plan.incident != incident.id and task not in answered:
                    continue  # another incident's plan counts only for tasks that this incident's plans changed
                claims += failure_claims(impact, times, first=task not in answered, as_of=as_of)
                answered.add(task)
                if (plan.id, task) not in charged:
                    charged.add((plan.id, task))
                    starts += start_claims(impact, incident.id, as_of)
    training: list[Claim] = []
    for plan in sorted(plans, key=lambda view: view.position):
        for task, impact in plan.impacts.items():
            training += training_claims(impact, as_of)
            if (plan.id, task) not in charged:
                claims += planned_claims(impact, as_of)
                starts += start_claims(impact, "", as_of)
    return [*claims, *training, *starts]


@dataclass(frozen=True)
class Ledger:
    """All charges up to a time, and the price of a worker-hour."""

    charges: list[Charge]
    price_per_worker_hour: float

    def incident(self, incident: str) -> IncidentCost:
        """Return the cost of one incident."""
        return incident_cost(
            total((c for c in self.charges if c.claim.incident == incident), self.price_per_worker_hour)
        )

    def by_incident(self) -> dict[str, IncidentCost]:
        """Return the cost of every incident that has one."""
        groups: dict[str, list[Charge]] = {}
        for charge in self.charges:
            if charge.claim.incident:
                groups.setdefault(charge.claim.incident, []).append(charge)
        return {name: incident_cost(total(charges, self.price_per_worker_hour)) for name, charges in groups.items()}


NO_COST = IncidentCost(
    detection_worker_s=0, transition_worker_s=0, recompute_worker_s=0, sub_healthy_worker_s=0, lost_flop=0, money=0
)


def incident_cost(cost: Cost) -> IncidentCost:
    """Return the cost as the interface shows it."""
    return IncidentCost(
        detection_worker_s=cost.detection_worker_s,
        transition_worker_s=cost.transition_worker_s,
        recompute_worker_s=cost.recompute_worker_s,
        sub_healthy_worker_s=cost.sub_healthy_worker_s,
        lost_flop=cost.lost_flop,
        money=cost.money,
    )


def ledger(
    plans: Sequence[PlanView], incidents: Sequence[IncidentView], cluster: ClusterView, as_of: datetime
) -> Ledger:
    """Settle everything up to ``as_of``."""
    return Ledger(settle(all_claims(plans, incidents, as_of)), cluster.price_per_worker_hour)


def held_worker_s(claims: Iterable[Claim]) -> float:
    """Return the worker-seconds that claims cover: for each worker the length of their union (by a sweep)."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for claim in claims:
        spans.setdefault(claim.worker, []).append((claim.start_s, claim.end_s))
    held = 0.0
    for worker_spans in spans.values():
        reached = float("-inf")
        for start, end in sorted(worker_spans):
            held += max(end - max(start, reached), 0.0)
            reached = max(reached, end)
    return held


def _fraction(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _task_cost(task: TaskView | None, name: str, charges: list[Charge], price: float) -> TaskCost:
    failure = total(charges, price)
    training = worker_s(charges, Part.TRAINING)
    held = sum(charge.worker_s for charge in charges)
    return TaskCost(
        task=name,
        worker_s=held,
        training_worker_s=training,
        planned_worker_s=worker_s(charges, Part.PLANNED),
        detection_worker_s=failure.detection_worker_s,
        transition_worker_s=failure.transition_worker_s,
        recompute_worker_s=failure.recompute_worker_s,
        sub_healthy_worker_s=failure.sub_healthy_worker_s,
        flop=task.flop(task.step) if task is not None else 0.0,
        lost_flop=failure.lost_flop,
        goodput_fraction=_fraction(training, held),
        money=money(held, price),
        failure_money=failure.money,
    )


def report(
    tasks: Sequence[TaskView],
    incidents: Sequence[IncidentView],
    plans: Sequence[PlanView],
    cluster: ClusterView,
    as_of: datetime,
) -> Costs:
    """Return the cost report with its sum check."""
    claims = all_claims(plans, incidents, as_of)
    book = Ledger(settle(claims), cluster.price_per_worker_hour)
    price = cluster.price_per_worker_hour
    views = {task.name: task for task in tasks}
    by_task: dict[str, list[Charge]] = {name: [] for name in views}
    for charge in book.charges:
        by_task.setdefault(charge.claim.task, []).append(charge)
    task_costs = [_task_cost(views.get(name), name, charges, price) for name, charges in by_task.items()]
    costs = book.by_incident()
    rows = [
        IncidentCostRow(
            incident=incident.id,
            kind=incident.kind,
            severity=incident.severity,
            tasks=incident.tasks,
            **costs.get(incident.id, NO_COST).model_dump(),
        )
        for incident in incidents
    ]
    totals = _totals(book, task_costs, price)
    by_incident = sum(_failure_worker_s(row) for row in rows)
    parts = totals.training_worker_s + totals.planned_worker_s + totals.failure_worker_s
    held = held_worker_s(claims)
    check = SumCheck(
        by_task_worker_s=sum(_failure_worker_s(row) for row in task_costs),
        by_incident_worker_s=by_incident,
        parts_worker_s=parts,
        held_worker_s=held,
        ok=_same(totals.failure_worker_s, by_incident) and _same(parts, held),
    )
    return Costs(
        as_of=as_of,
        currency=cluster.currency,
        price_per_worker_hour=price,
        tasks=task_costs,
        incidents=rows,
        totals=totals,
        sum_check=check,
    )


def _failure_worker_s(row: TaskCost | IncidentCost) -> float:
    return row.detection_worker_s + row.transition_worker_s + row.recompute_worker_s + row.sub_healthy_worker_s


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _SUM_TOLERANCE * max(abs(a), abs(b), 1.0)


def _totals(book: Ledger, rows: Sequence[TaskCost], price: float) -> CostTotals:
    failure = total(book.charges, price)
    held = sum(row.worker_s for row in rows)
    training = sum(row.training_worker_s for row in rows)
    return CostTotals(
        **{**incident_cost(failure).model_dump(), "money": money(held, price)},
        worker_s=held,
        training_worker_s=training,
        planned_worker_s=sum(row.planned_worker_s for row in rows),
        failure_worker_s=sum(_failure_worker_s(row) for row in rows),
        flop=sum(row.flop for row in rows),
        goodput_fraction=_fraction(training, held),
        failure_money=failure.money,
    )
