"""The cost report: the ledger (``services/api/ledger.py``) by incident, by task and by other keys. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

from services.api.charges import Charge, Interval, money, total, worker_s
from services.api.claims import Claim, Part
from services.api.cost_models import (
    Bucket,
    Costs,
    CostTotals,
    IncidentCost,
    IncidentCostRow,
    ServiceLevel,
    Share,
    SumCheck,
    TaskCost,
)
from services.api.ledger import CATEGORIES, History, Ledger, categories, incident_cost, ledger
from services.api.service_levels import (
    achieved_flop,
    effective_training_time_ratio,
    fraction,
    healthy_flop,
    service_level,
)
from services.api.span_claims import Window, overlapping, union
from services.api.views import ClusterView, NodeView, TaskView

Period = Literal["day", "week"]
"""Length of a bucket: a day of UTC, or seven of them from a Monday on."""

_SUM_TOLERANCE = 1e-6
"""Relative difference that rounding of float64 sums may leave between two orders of adding."""

_UNUSED = frozenset({Part.UNSCHEDULED, Part.IDLE})

NO_COST = incident_cost([], 0.0)


def held_worker_s(claims: Iterable[Claim], allocated: Mapping[str, Sequence[Interval]] | None = None) -> float:
    """Return the worker-seconds that claims cover: for each worker the length of their union (by a sweep).

    ``allocated``: times of each worker, outside of which nothing counts; None: all time.
    """
    intervals: dict[str, list[Interval]] = {}
    for claim in claims:
        if claim.end_s > claim.start_s:
            intervals.setdefault(claim.worker, []).append((claim.start_s, claim.end_s))
    held = 0.0
    for worker, covered in intervals.items():
        within = [(-math.inf, math.inf)] if allocated is None else allocated.get(worker, ())
        joined = union(covered)
        held += sum(high - low for start, end in within for low, high in overlapping(joined, start, end))
    return held


def allocated_worker_s(nodes: Iterable[NodeView], as_of: datetime) -> float:
    """Return the worker-seconds that nodes were allocated, as counted when they joined and left."""
    allocated = 0.0
    for node in nodes:
        since = node.allocated_since
        running_s = max((as_of - since).total_seconds(), 0.0) if since is not None else 0.0
        allocated += node.allocated_worker_s + len(node.workers) * running_s
    return allocated


def report(
    tasks: Sequence[TaskView],
    history: History,
    nodes: Sequence[NodeView],
    cluster: ClusterView,
    as_of: datetime,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    period: Period | None = None,
) -> Costs:
    """Return the cost report with its sum check.

    Args:
        tasks: all tasks.
        history: what the ledger is made of.
        nodes: all nodes.
        cluster: price and currency.
        as_of: the present time.
        start: of the time that is accounted for; None: all time before ``end``.
        end: of that time, at most the present; None: the present.
        period: the length of buckets; None: no buckets.
    """
    as_of = history.present(as_of)
    until = as_of if end is None else min(end, as_of)
    price = cluster.price_per_worker_hour
    window = Window.of(start, until)
    book = ledger(history, price, as_of, window)
    whole = start is None and end is None
    spans_s = sum(high - low for intervals in book.allocated.values() for low, high in intervals)
    allocated = allocated_worker_s(nodes, as_of) if whole else spans_s
    views = {task.name: task for task in tasks}
    by_task: dict[str, list[Charge]] = {name: [] for name in views}
    by_task |= book.group(lambda charge: charge.claim.task)
    without_task = by_task.pop("", [])
    task_costs = [_task_cost(views.get(name), name, charges, price, window) for name, charges in by_task.items()]
    costs = book.by_incident()
    rows = [
        IncidentCostRow(
            incident=incident.id,
            kind=incident.kind,
            severity=incident.severity,
            tasks=incident.tasks,
            **costs.get(incident.id, NO_COST).model_dump(),
        )
        for incident in history.incidents
    ]
    totals = _totals(book, task_costs, price)
    kinds = categories(book.charges)

    def level(part: Mapping[str, float], within: Window) -> ServiceLevel:
        achieved = achieved_flop(history.spans, views, within, as_of.timestamp())
        return service_level(part, achieved, healthy_flop(history.spans, within))

    return Costs(
        as_of=as_of,
        window_start=start,
        window_end=until,
        currency=cluster.currency,
        price_per_worker_hour=price,
        categories=kinds,
        allocated_worker_s=allocated,
        allocated_money=money(allocated, price),
        service=level(kinds, window),
        breakdowns={
            name: [_share(key, charges, price) for key, charges in sorted(book.group(keyed).items())]
            for name, keyed in book.dimensions().items()
        },
        buckets=list(_buckets(book, period, window, level)) if period is not None else [],
        tasks=task_costs,
        incidents=rows,
        totals=totals,
        sum_check=_sum_check(
            totals,
            by_task=sum(map(_failure_worker_s, task_costs)) + _failure_worker_s(incident_cost(without_task, price)),
            by_incident=sum(_failure_worker_s(row) for row in rows),
            held=held_worker_s((c.claim for c in book.charges if c.claim.part not in _UNUSED), book.allocated),
            kinds=sum(kinds.values()),
            allocated=allocated,
        ),
    )


def _sum_check(
    totals: CostTotals, *, by_task: float, by_incident: float, held: float, kinds: float, allocated: float
) -> SumCheck:
    parts = totals.training_worker_s + totals.planned_worker_s + totals.failure_worker_s
    return SumCheck(
        by_task_worker_s=by_task,
        by_incident_worker_s=by_incident,
        parts_worker_s=parts,
        held_worker_s=held,
        categories_worker_s=kinds,
        allocated_worker_s=allocated,
        ok=_same(by_task, by_incident) and _same(parts, held) and _same(kinds, allocated),
    )


def _share(key: str, charges: Iterable[Charge], price: float) -> Share:
    kinds = categories(charges)
    allocated = sum(kinds.values())
    return Share(key=key, categories=kinds, allocated_worker_s=allocated, money=money(allocated, price))


def _buckets(
    book: Ledger, period: Period, window: Window, level: Callable[[Mapping[str, float], Window], ServiceLevel]
) -> Iterator[Bucket]:
    """Yield the days or weeks of the window, from the first in which a worker was allocated."""
    bounds = [bound for intervals in book.allocated.values() for interval in intervals for bound in interval]
    if not bounds:
        return
    first, last_s = datetime.fromtimestamp(min(bounds), UTC), max(bounds)
    start = first.replace(hour=0, minute=0, second=0, microsecond=0)
    length = timedelta(days=1)
    if period == "week":
        start, length = start - timedelta(days=start.weekday()), timedelta(weeks=1)
    starts = [start]
    while (following := starts[-1] + length).timestamp() < last_s:
        starts.append(following)
    seconds = [dict.fromkeys(CATEGORIES.values(), 0.0) for _ in starts]
    for charge in book.charges:
        for low, high in charge.intervals:
            # All buckets have the same length: UTC has no daylight saving time.
            at = int((low - start.timestamp()) // length.total_seconds())
            while low < high:
                bound = min(high, (start + (at + 1) * length).timestamp())
                seconds[at][CATEGORIES[charge.claim.part]] += bound - low
                low, at = bound, at + 1
    for begin, kinds in zip(starts, seconds, strict=True):
        allocated = sum(kinds.values())
        yield Bucket(
            key=begin.date().isoformat(),
            start=begin,
            end=begin + length,
            categories=kinds,
            allocated_worker_s=allocated,
            money=money(allocated, book.price_per_worker_hour),
            service=level(kinds, Window(*window.clip(begin.timestamp(), (begin + length).timestamp()))),
        )


def _task_cost(task: TaskView | None, name: str, charges: list[Charge], price: float, window: Window) -> TaskCost:
    failure = total(charges, price)
    training = worker_s(charges, Part.TRAINING)
    held = sum(charge.worker_s for charge in charges)
    flop = task.flop(task.step) if task is not None else 0.0
    return TaskCost(
        task=name,
        worker_s=held,
        training_worker_s=training,
        planned_worker_s=worker_s(charges, Part.PLANNED),
        detection_worker_s=failure.detection_worker_s,
        transition_worker_s=failure.transition_worker_s,
        recompute_worker_s=failure.recompute_worker_s,
        sub_healthy_worker_s=failure.sub_healthy_worker_s,
        lost_worker_s=failure.lost_worker_s,
        flop=flop,
        weighted_flop=flop * task.spec.weight if task is not None else 0.0,
        lost_flop=failure.lost_flop,
        goodput_fraction=fraction(training, held),
        ettr=effective_training_time_ratio(task, charges, window) if task is not None else None,
        money=money(held, price),
        failure_money=failure.money,
    )


def _failure_worker_s(row: TaskCost | IncidentCost) -> float:
    return row.detection_worker_s + row.transition_worker_s + row.recompute_worker_s + row.sub_healthy_worker_s


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _SUM_TOLERANCE * max(abs(a), abs(b), 1.0)


def _totals(book: Ledger, rows: Sequence[TaskCost], price: float) -> CostTotals:
    failure = incident_cost(book.charges, price)
    held = sum(charge.worker_s for charge in book.charges if charge.claim.part not in _UNUSED)
    training = worker_s(book.charges, Part.TRAINING)
    return CostTotals(
        **{**failure.model_dump(), "money": money(held, price)},
        worker_s=held,
        training_worker_s=training,
        planned_worker_s=worker_s(book.charges, Part.PLANNED),
        failure_worker_s=_failure_worker_s(failure),
        flop=sum(row.flop for row in rows),
        weighted_flop=sum(row.weighted_flop for row in rows),
        goodput_fraction=fraction(training, held),
    )
