"""The cost report: what was settled (``costs/settlement.py``), by incident, by task and by other keys. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from shared.costs.charges import money
from shared.costs.claims import Part
from shared.costs.ledger import CATEGORIES
from shared.costs.service_levels import fraction, service_level
from shared.costs.settlement import (
    ALL,
    CAUSE,
    INCIDENT,
    NODE,
    PARTS,
    SUBMISSION,
    TASK,
    Amounts,
    Sums,
    add,
    costliest,
    failure_worker_s,
    no_amounts,
    submission_key,
)
from shared.costs.span_claims import Window
from shared.interface.costs import Bucket, Costs, CostTotals, IncidentCost, IncidentCostRow, Share, SumCheck, TaskCost
from shared.views.documents import ClusterView, IncidentView, NodeView, TaskView

Period = Literal["day", "week"]
"""Length of a bucket: a day of UTC, or seven of them from a Monday on."""

_SUM_TOLERANCE = 1e-6
"""Relative difference that rounding of float64 sums may leave between two orders of adding."""


@dataclass(frozen=True)
class Day:
    """Amounts of everything on a day of UTC, and the weighted FLOP of the steps done on it."""

    start: datetime
    amounts: Amounts
    achieved_flop: float


@dataclass(frozen=True)
class Account:
    """The input of a report.

    ``start``, ``end``: as asked for; ``window``: the time from then on, and up to at most the present, ``as_of``.
    ``sums``: the amounts of the window. ``tasks``, ``incidents``: in the order of the report. ``nodes``: all. ``flop``,
    ``weighted_flop``: those of all tasks. ``achieved_flop``: weighted, of the steps done in the window. ``days``: the
    days of the window, in order, from the first to the last on which a worker was allocated, if asked for. ``limit``:
    most tasks and most incidents to report; None: all.
    """

    as_of: datetime
    start: datetime | None
    end: datetime | None
    window: Window
    sums: Sums
    tasks: Mapping[str, TaskView]
    incidents: Sequence[IncidentView]
    nodes: Sequence[NodeView]
    flop: float
    weighted_flop: float
    achieved_flop: float
    days: Sequence[Day] = ()
    limit: int | None = None


def allocated_worker_s(nodes: Iterable[NodeView], as_of: datetime) -> float:
    """Return the worker-seconds that nodes were allocated, as counted when they joined and left."""
    allocated = 0.0
    for node in nodes:
        since = node.allocated_since
        running_s = max((as_of - since).total_seconds(), 0.0) if since is not None else 0.0
        allocated += node.allocated_worker_s + len(node.workers) * running_s
    return allocated


def report(account: Account, cluster: ClusterView, *, period: Period | None = None, breakdowns: bool = True) -> Costs:
    """Return the cost report with its sum check.

    Args:
        account: its input.
        cluster: price and currency.
        period: the length of buckets; None: no buckets.
        breakdowns: whether to break the time down: a row for every node.
    """
    price, sums = cluster.price_per_worker_hour, account.sums
    whole = sums[ALL].get("", no_amounts())
    until = account.as_of if account.end is None else min(account.end, account.as_of)
    of_all_time = account.start is None and account.end is None
    allocated = allocated_worker_s(account.nodes, account.as_of) if of_all_time else whole["allocated_worker_s"]
    names = [*account.tasks, *(name for name in sums[TASK] if name and name not in account.tasks)]
    return Costs(
        as_of=account.as_of,
        window_start=account.start,
        window_end=until,
        currency=cluster.currency,
        price_per_worker_hour=price,
        categories=categories(whole),
        allocated_worker_s=allocated,
        allocated_money=money(allocated, price),
        service=service_level(categories(whole), account.achieved_flop, whole["healthy_flop"]),
        breakdowns=_breakdowns(account, price) if breakdowns else {},
        buckets=list(_buckets(account.days, period, account.window, price)) if period is not None else [],
        tasks=[_task_cost(account, name, price) for name in names[: account.limit]],
        incidents=[
            IncidentCostRow(
                incident=incident.id,
                kind=incident.kind,
                severity=incident.severity,
                tasks=incident.tasks,
                failed_tasks=incident.failed_tasks,
                **incident_cost(sums[INCIDENT].get(incident.id), price).model_dump(),
            )
            for incident in account.incidents
        ],
        totals=_totals(account, whole, price),
        sum_check=_sum_check(whole, allocated),
    )


def categories(amounts: Amounts) -> dict[str, float]:
    """Return the worker-seconds of every kind."""
    return {kind: amounts[PARTS[part]] for part, kind in CATEGORIES.items()}


def incident_cost(amounts: Amounts | None, price: float) -> IncidentCost:
    """Return the failure parts of amounts as the interface shows them; None: the parts of nothing."""
    found = amounts or no_amounts()
    price_of_all = money(failure_worker_s(found), price)
    return IncidentCost(
        detection_worker_s=found[PARTS[Part.DETECTION]],
        transition_worker_s=found[PARTS[Part.TRANSITION]],
        recompute_worker_s=found[PARTS[Part.RECOMPUTE]],
        sub_healthy_worker_s=found[PARTS[Part.LOST]] + found[PARTS[Part.SUB_HEALTHY]],
        lost_worker_s=found[PARTS[Part.LOST]],
        lost_flop=found["lost_flop"],
        money=price_of_all,
        failure_money=price_of_all,
    )


NO_COST = incident_cost(None, 0.0)


def _breakdowns(account: Account, price: float) -> dict[str, list[Share]]:
    """Return the time by every key: the costliest tasks and incidents, and the time that belongs to none."""
    sums = account.sums
    hardware = {node.name: node.hardware for node in account.nodes}
    by_hardware: Sums = {}
    for node, amounts in sums[NODE].items():
        add(by_hardware, {"hardware": {hardware.get(node, ""): amounts}})
    rows = {
        "task": sums[TASK],
        "node": sums[NODE],
        "hardware": by_hardware.get("hardware", {}),
        "cause": sums[CAUSE],
        "incident": sums[INCIDENT],
    }
    shown: dict[str, Callable[[str], bool]] = {}
    if account.limit is not None:
        for name in ("task", "incident"):
            keys = {"", *costliest(rows[name], account.limit)}
            shown[name] = keys.__contains__
    return {
        name: [_share(key, part[key], price) for key in sorted(part) if name not in shown or shown[name](key)]
        for name, part in rows.items()
    }


def _share(key: str, amounts: Amounts, price: float) -> Share:
    kinds = categories(amounts)
    allocated = sum(kinds.values())
    return Share(key=key, categories=kinds, allocated_worker_s=allocated, money=money(allocated, price))


def _buckets(days: Sequence[Day], period: Period, window: Window, price: float) -> Iterator[Bucket]:
    """Yield the days or weeks of the window, from the first in which a worker was allocated, to the last."""
    if not days:
        return
    start = days[0].start
    length = timedelta(days=1)
    if period == "week":
        start, length = start - timedelta(days=start.weekday()), timedelta(weeks=1)
    while start <= days[-1].start:
        within = [day for day in days if start <= day.start < start + length]
        amounts: Sums = {}
        add(amounts, {ALL: {"": no_amounts()}})
        for day in within:
            add(amounts, {ALL: {"": day.amounts}})
        kinds = categories(amounts[ALL][""])
        allocated = sum(kinds.values())
        achieved = sum(day.achieved_flop for day in within)
        yield Bucket(
            key=start.date().isoformat(),
            start=start,
            end=start + length,
            categories=kinds,
            allocated_worker_s=allocated,
            money=money(allocated, price),
            service=service_level(kinds, achieved, amounts[ALL][""]["healthy_flop"]),
        )
        start += length


def _task_cost(account: Account, name: str, price: float) -> TaskCost:
    task = account.tasks.get(name)
    amounts = account.sums[TASK].get(name, no_amounts())
    failure = incident_cost(amounts, price)
    held = amounts["worker_s"]
    training = amounts[PARTS[Part.TRAINING]]
    return TaskCost(
        task=name,
        worker_s=held,
        training_worker_s=training,
        planned_worker_s=amounts[PARTS[Part.PLANNED]],
        detection_worker_s=failure.detection_worker_s,
        transition_worker_s=failure.transition_worker_s,
        recompute_worker_s=failure.recompute_worker_s,
        sub_healthy_worker_s=failure.sub_healthy_worker_s,
        lost_worker_s=failure.lost_worker_s,
        flop=task.flop(task.step) if task is not None else 0.0,
        weighted_flop=task.weighted_flop(task.step) if task is not None else 0.0,
        lost_flop=failure.lost_flop,
        goodput_fraction=fraction(training, held),
        ettr=_effective_training_time_ratio(account, task) if task is not None else None,
        money=money(held, price),
        failure_money=failure.failure_money,
    )


def _effective_training_time_ratio(account: Account, task: TaskView) -> float | None:
    """Return the share of the task's time, from its submission to its end, in which some worker trained."""
    end_s = account.window.end_s if task.ended_at is None else task.ended_at.timestamp()
    start, end = account.window.clip(task.submitted_at.timestamp(), end_s)
    trained = account.sums[SUBMISSION].get(submission_key(task))
    return fraction(trained["trained_s"] if trained is not None else 0.0, end - start)


def _totals(account: Account, whole: Amounts, price: float) -> CostTotals:
    failure = incident_cost(whole, price)
    held = whole["worker_s"] - whole[PARTS[Part.UNSCHEDULED]] - whole[PARTS[Part.IDLE]]
    training = whole[PARTS[Part.TRAINING]]
    return CostTotals(
        **{**failure.model_dump(), "money": money(held, price)},
        worker_s=held,
        training_worker_s=training,
        planned_worker_s=whole[PARTS[Part.PLANNED]],
        failure_worker_s=failure_worker_s(whole),
        flop=account.flop,
        weighted_flop=account.weighted_flop,
        goodput_fraction=fraction(training, held),
    )


def _sum_check(whole: Amounts, allocated: float) -> SumCheck:
    by_task, by_incident = whole["by_task_worker_s"], whole["by_incident_worker_s"]
    parts = whole[PARTS[Part.TRAINING]] + whole[PARTS[Part.PLANNED]] + failure_worker_s(whole)
    held, kinds = whole["held_worker_s"], whole["worker_s"]
    return SumCheck(
        by_task_worker_s=by_task,
        by_incident_worker_s=by_incident,
        parts_worker_s=parts,
        held_worker_s=held,
        categories_worker_s=kinds,
        allocated_worker_s=allocated,
        ok=_same(by_task, by_incident) and _same(parts, held) and _same(kinds, allocated),
    )


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _SUM_TOLERANCE * max(abs(a), abs(b), 1.0)
