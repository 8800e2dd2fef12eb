"""Answers of the interface, the stable contract. Times are UTC ISO 8601 with microseconds.

``services/api/present.py`` and ``services/api/costs.py`` make them from the views (``services/api/views.py``).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from services.api.views import Milestone, NodeState, PlanState, Result
from shared.plans import Layout, Response, Trigger
from shared.severities import ErrorKind, Method, Severity
from shared.tasks import TaskSpec, TaskState


def iso(at: datetime) -> str:
    """Return a time as text, always in UTC and always with microseconds."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")


Time = Annotated[datetime, PlainSerializer(iso, return_type=str, when_used="json-unless-none")]

T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    """A part of a list. ``next_cursor``: value of the parameter ``cursor`` for the next part; null at the end."""

    items: list[T]
    next_cursor: str | None


class Rank(BaseModel):
    """A rank of a task. ``worker`` stays when ranks are renumbered. ``state``: as the node agent reports it."""

    rank: int
    worker: str
    node: str
    pid: int | None
    state: str


class CheckpointFailure(BaseModel):
    """A checkpoint that could not be written. ``worker``: the one that reported it."""

    step: int
    worker: str
    reason: str
    at: Time


class StopRefusal(BaseModel):
    """Why a task has not stopped as asked: the checkpoint of ``step`` could not be written."""

    step: int
    reason: str
    at: Time


class StopOptions(BaseModel):
    """How to stop a task. ``lose_steps``: also if its state cannot be saved."""

    model_config = ConfigDict(extra="forbid")

    lose_steps: bool = False


class Task(BaseModel):
    """A task. ``step``: updates applied. ``throughput_flop_per_s``: model FLOP/s of all workers; ``waf``: weighted.

    ``checkpoint``, ``saved_step``: the newest checkpoint. ``checkpoint_failure``: the newest that could not be written,
    until one is written. ``stop_refused``: the answer to the newest request to stop, if that was refused.
    """

    name: str
    id: str
    state: TaskState
    reason: str
    step: int
    steps: int
    weight: float
    workers: int
    layout: Layout | None
    ranks: list[Rank]
    generation: int
    loss: float | None
    step_s: float | None
    throughput_flop_per_s: float
    waf_flop_per_s: float
    plan: str | None
    checkpoint: str | None
    saved_step: int
    checkpoint_failure: CheckpointFailure | None
    stop_refused: StopRefusal | None
    submitted_at: Time
    started_at: Time | None
    ended_at: Time | None
    result: Result | None
    traceback: str | None
    spec: TaskSpec


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


class Incident(BaseModel):
    """A fault. ``resumed_at``: end of the interrupted step; ``restored_at``: return to planned strength.

    ``task``: of a fault of one task; null for a node's. ``tasks``: all that the fault hit or its plans changed.
    """

    id: str
    kind: ErrorKind
    severity: Severity
    method: Method
    node: str | None
    worker: str | None
    task: str | None
    tasks: list[str]
    rank: int | None
    step: int | None
    occurred_at: Time
    detected_at: Time
    planned_at: Time | None
    resumed_at: Time | None
    restored_at: Time | None
    response: str | None
    plans: list[str]
    state_source: str | None
    steps_recomputed: int
    cost: IncidentCost
    evidence: dict[str, Any]


class PlanSummary(BaseModel):
    """A plan without the problem and the alternatives that it was decided from."""

    id: str
    trigger: Trigger
    cause: str
    incident: str | None
    response: Response
    state: PlanState
    supersedes: list[str]
    superseded_by: str | None
    tasks: list[str]
    queued: dict[str, str]
    decided_at: Time
    position: int


class PlanDetail(PlanSummary):
    """A plan with its words, its milestones and the event as it is in the log.

    ``inputs_sha256``: digest of the canonical JSON of the event's problem; empty where no solver was asked.
    """

    words: str
    inputs_sha256: str
    milestones: list[Milestone]
    event: dict[str, Any]


class NodeWorker(BaseModel):
    """A worker slot."""

    worker: str
    task: str | None
    rank: int | None
    state: str


ShownNodeState = NodeState | Literal["unreachable"]
"""State of a node: that of the log, or ``unreachable``: takes part by the log, and is not heard by the detector now."""


class Node(BaseModel):
    """A node. ``reason``: of a state other than ready. ``recorded_state``: that of the log, also while it is silent.

    ``incarnation``: of its agent, new for every start of one.
    """

    name: str
    state: ShownNodeState
    recorded_state: NodeState
    reason: str
    incarnation: str
    agent_pid: int
    domain: str
    workers: list[NodeWorker]
    joined_at: Time
    last_heartbeat_at: Time | None


class NodeRequest(BaseModel):
    """What a user asks of a node. ``reason``: in words, for other people."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="", max_length=200)


class DrainRequest(NodeRequest):
    """``timeout_s``: how long tasks may take to move away; null: the setting ``drain_timeout_s``."""

    timeout_s: float | None = Field(default=None, ge=0, le=86_400)


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
    """An incident in the cost report."""

    incident: str
    kind: ErrorKind
    severity: Severity
    tasks: list[str]


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


class EventRecord(BaseModel):
    """An event with its place in the log."""

    position: int
    stream: str
    stream_version: int
    recorded_at: Time
    type: str
    event: dict[str, Any]
    previous_hash: str
    hash: str


class Stopping(BaseModel):
    """Answer to a stop request."""

    name: str
    state: TaskState
    reason: str


class Check(BaseModel):
    """One condition of readiness.

    ``counters``: numbers by name, of a service; of all agents (check ``nodes``); of the api itself (check ``bus``).
    """

    name: str
    ok: bool
    detail: str = Field(default="")
    counters: dict[str, int] = Field(default_factory=dict)


class Readiness(BaseModel):
    """Whether tasks can be submitted."""

    ready: bool
    checks: list[Check]
