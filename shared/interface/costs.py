"""Answers of the interface about costs (docs/costs.md). ``shared/costs/report.py`` makes them from the ledger."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from shared.events.severities import ErrorKind, Severity
from shared.text import Time


class IncidentCost(BaseModel):
    """Cost of one incident so far (docs/costs.md). ``transition`` does not include ``recompute``.

    ``sub_healthy_worker_s``: of lost workers (``lost_worker_s``), and of those present that it leaves unused or used
    worse. ``lost_flop``: weighted FLOP not achieved. ``money``, ``failure_money``: price of all these worker-seconds.
    """

    detection_worker_s: float
    transition_worker_s: float
    recompute_worker_s: float
    sub_healthy_worker_s: float
    lost_worker_s: float
    lost_flop: float
    money: float
    failure_money: float


class Counterfactual(BaseModel):
    """What an incident would have cost with another answer: a model, not a measurement (docs/costs.md).

    ``worker_s``, ``lost_flop``: to be compared with the sum of the incident's parts, and with its ``lost_flop``;
    ``worker_s`` is null where the model says nothing of it. ``assumptions``: in words.
    """

    answer: Literal["plain-restart", "wait-for-the-node", "only-failed-task-shrinks"]
    worker_s: float | None
    lost_flop: float
    assumptions: list[str]


class TaskCost(BaseModel):
    """A task's worker-seconds by use; ``worker_s``, the time of all its workers, = training + planned + failure parts.

    Workers that an incident has taken from the task count as its own until it has as many again, or ends.

    ``goodput_fraction``: training / ``worker_s``. ``flop``: model FLOP of the updates applied, whatever the window;
    ``weighted_flop``: times the task's weight, as ``lost_flop`` is. ``lost_worker_s``: of ``sub_healthy_worker_s``.
    ``money``: price of ``worker_s``; ``failure_money``: price of the failure parts. ``ettr``: effective training time
    ratio, the share of the time from submission to end in which some worker trained.
    """

    task: str
    worker_s: float
    training_worker_s: float
    planned_worker_s: float
    detection_worker_s: float
    transition_worker_s: float
    recompute_worker_s: float
    sub_healthy_worker_s: float
    lost_worker_s: float
    flop: float
    weighted_flop: float
    lost_flop: float
    goodput_fraction: float | None
    ettr: float | None
    money: float
    failure_money: float


class IncidentCostRow(IncidentCost):
    """An incident in the cost report. ``failed_tasks``: those that did not survive it, and why."""

    incident: str
    kind: ErrorKind
    severity: Severity
    tasks: list[str]
    failed_tasks: dict[str, str]


class CostTotals(IncidentCost):
    """Sums over all tasks, and over workers that an incident has taken and no task lacks.

    ``failure_worker_s``: the failure parts. ``money``: price of ``worker_s``.
    """

    worker_s: float
    training_worker_s: float
    planned_worker_s: float
    failure_worker_s: float
    flop: float
    weighted_flop: float
    goodput_fraction: float | None


class SumCheck(BaseModel):
    """Three checks: each compares two sums that are made in different ways.

    Failure parts by task (and without a task), and by incident. All parts, and the time that the claims of plans and
    incidents cover. All kinds of time (``categories_worker_s``), and the allocated time (``allocated_worker_s``), which
    is counted as nodes join and leave, without any claim.
    """

    by_task_worker_s: float
    by_incident_worker_s: float
    parts_worker_s: float
    held_worker_s: float
    categories_worker_s: float
    allocated_worker_s: float
    ok: bool


class Share(BaseModel):
    """A part of the allocated time. ``key``: of a task, node, ...; empty for time that belongs to none.

    ``categories``: worker-seconds by kind; they add up to ``allocated_worker_s``. ``money``: the price of that.
    """

    key: str
    categories: dict[str, float]
    allocated_worker_s: float
    money: float


class ServiceLevel(BaseModel):
    """What was achieved in a window. ``availability``: share of the allocated time that is not lost.

    ``goodput_fraction``: share of it that is useful. ``achieved_flop``: weighted FLOP of the steps done.
    ``healthy_flop``: integral of the healthy line, the WAF of the best plan on all allocated workers; ``waf_fraction``:
    achieved / healthy.
    """

    availability: float | None
    goodput_fraction: float | None
    achieved_flop: float
    healthy_flop: float
    waf_fraction: float | None


class WafHistory(BaseModel):
    """WAF over a window that is cut into times of equal length, ``point_s``; each value is the mean of one of them.

    ``waf_flop_per_s``: weighted FLOP of the steps done, over the time; steps are spread evenly over the time in which
    their task progressed under one plan. ``healthy_flop_per_s``: of the healthy line; 0 where there is none.
    """

    window_start: Time
    window_end: Time
    point_s: float
    waf_flop_per_s: list[float]
    healthy_flop_per_s: list[float]


class Bucket(Share):
    """A day or a week of the window, in UTC. ``key``: its first day, as a date."""

    start: Time
    end: Time
    service: ServiceLevel


class Costs(BaseModel):
    """The cost report (docs/costs.md).

    ``window_start``, ``window_end``: the time that is accounted for; ``window_start`` is null for all time before.
    ``categories``: worker-seconds by kind; each allocated second has one, so they add up to ``allocated_worker_s``.
    ``allocated_money``: the price of that. ``breakdowns``: the same time by task, node, hardware, cause and incident.
    ``buckets``: by day or week, if that was asked for.
    """

    as_of: Time
    window_start: Time | None
    window_end: Time
    currency: str
    price_per_worker_hour: float
    categories: dict[str, float]
    allocated_worker_s: float
    allocated_money: float
    service: ServiceLevel
    breakdowns: dict[str, list[Share]]
    buckets: list[Bucket]
    tasks: list[TaskCost]
    incidents: list[IncidentCostRow]
    totals: CostTotals
    sum_check: SumCheck
