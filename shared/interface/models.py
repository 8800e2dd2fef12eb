"""Answers of the interface, and bodies of requests: the stable contract. Times are UTC ISO 8601 with microseconds.

``services/api/present.py`` makes them from the views (``shared/views/documents.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from shared.events.node_events import ReportSeverity
from shared.events.plans import Layout, Response, Trigger
from shared.events.request_events import NoteText
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import Observation
from shared.interface.costs import Counterfactual, IncidentCost
from shared.tasks.specification import Count, TaskSpec, TaskState
from shared.text import Time
from shared.views.documents import Milestone, NodeState, PlanState
from shared.views.incident_parts import FailureAttempt as FailureAttempt
from shared.views.task_parts import Result

T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    """A part of a list. ``next_cursor``: value of the parameter ``cursor`` for the next part; null at the end."""

    items: list[T]
    next_cursor: str | None


class Rank(BaseModel):
    """A rank of a task. ``worker`` stays when ranks are renumbered. ``state``: as the node agent reports it.

    ``slowdown``: own compute time over that of its peers; 1.0: it is not slower.
    """

    rank: int
    worker: str
    node: str
    pid: int | None
    state: str
    slowdown: float = 1.0


class Anomaly(BaseModel):
    """A number of a task that is unusual; ``value`` and ``expected`` in ``unit``. ``node``, ``peer``: of a slow link.

    ``step``: at which it began. The task trains on.
    """

    kind: str
    step: int
    value: float
    expected: float
    unit: str
    at: Time
    node: str | None
    peer: str | None


class StopOptions(BaseModel):
    """How to stop a task. ``lose_steps``: also if its state cannot be saved.

    ``at_once``: its processes end in the midst of a step, without a checkpoint: steps since the newest one are lost.
    """

    model_config = ConfigDict(extra="forbid")

    lose_steps: bool = False
    at_once: bool = False


class Task(BaseModel):
    """A task. ``owner``: who submitted it, ``uid/<uid>`` or ``token/<name>``. ``step``: updates applied.

    ``throughput_flop_per_s``: model FLOP/s of all workers; ``waf``: weighted.

    ``checkpoint``, ``saved_step``: the newest checkpoint. ``checkpoint_failure``: the newest that could not be written,
    until one is written. ``stop_refused``: the answer to the newest request to stop, if that was refused.

    ``memory_every``: steps between two copies in memory, as rank 0 has reported; 0: none are taken. ``replicated``:
    whether ranks in other failure domains have each part of the state too. Both None before they are known.
    ``copies_lacking``: why copies are missing that a recovery would rely on; None: none are known to be.
    ``copies_kept``: node -> bytes of copies that it keeps of a task without a process there, until the task is over.

    ``changed``: in words, what of its code, data, settings and libraries is not as it was before the task was resumed.
    ``newcomers_refused``: why new processes cannot take part, with both values; None: they can. ``wait``: why none is
    started now, after failures that came again; None: nothing holds them back.

    ``anomalies``: those that last. ``slow_workers``: worker -> slowdown, of its ranks that are slower than their peers.
    ``attempt``: number of this submission of the name. ``deleted_at``: since when it is not listed.
    """

    name: str
    id: str
    owner: str
    state: TaskState
    reason: str
    step: int
    steps: int | None
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
    memory_every: int | None
    replicated: bool | None
    checkpoint_failure: CheckpointFailure | None
    copies_lacking: CopiesLack | None
    copies_kept: dict[str, int]
    stop_refused: StopRefusal | None
    changed: list[str]
    newcomers_refused: str | None
    wait: TaskWait | None
    anomalies: list[Anomaly]
    slow_workers: dict[str, float]
    submitted_at: Time
    started_at: Time | None
    ended_at: Time | None
    deleted_at: Time | None
    attempt: int
    result: Result | None
    traceback: str | None
    spec: TaskSpec


class Attempt(BaseModel):
    """A submission of a task's name.

    ``number``: among those of the name, from 1 on. ``state``: the present one, or at the next submission.
    ``first_step``, ``last_step``: from which on and up to which it made updates. ``checkpoint``: from which it began.
    ``flop``, ``weighted_flop``: model FLOP of its updates, and times the weight that the task had at each.
    ``position``: of the submission in the log.
    """

    number: int
    id: str
    position: int
    owner: str
    state: TaskState
    reason: str
    checkpoint: str | None
    first_step: int
    last_step: int
    flop: float
    weighted_flop: float
    submitted_at: Time
    started_at: Time | None
    ended_at: Time | None
    deleted_at: Time | None
    result: Result | None
    traceback: str | None
    spec: TaskSpec


class ProgressPoint(BaseModel):
    """How far a task was. ``step``: updates applied. ``step_s``: median of recent steps; 0: none was timed."""

    at: Time
    step: int
    generation: int
    workers: int
    step_s: float
    loss: float | None


class TaskProgress(BaseModel):
    """How a submission of a task's name has trained, thinned out. ``points``: in their order."""

    attempt: int
    points: list[ProgressPoint]


class MetricSeries(BaseModel):
    """The values of a metric at steps, thinned out to as many as were asked for; null: not finite.

    ``every``: of each so many steps one is kept, since the task has more than is kept.
    """

    name: str
    every: int
    steps: list[int]
    values: list[float | None]


class TaskMetrics(BaseModel):
    """What the script of a submission has logged.

    ``names``: of all its metrics. ``series``: those that were asked for. ``left_out``: how many values had a name
    beyond the most names of a submission. ``silent``: nodes that do not answer; what they had written since they last
    did is missing.
    """

    attempt: int
    names: list[str]
    series: list[MetricSeries]
    left_out: int
    silent: list[str]


class Note(BaseModel):
    """What a user has written about an incident. ``by``: ``uid/<uid>`` or ``token/<name>``."""

    text: str
    by: str
    at: Time


class Acknowledgement(BaseModel):
    """Who takes care of an incident, and since when."""

    by: str
    at: Time


class IncidentFacts(BaseModel):
    """What the log says of an incident (``Incident``)."""

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
    closed_at: Time | None
    response: str | None
    plans: list[str]
    state_source: str | None
    steps_recomputed: int
    failed_tasks: dict[str, str]
    evidence: dict[str, Any]
    observations: list[Observation]
    omitted: int
    root_cause: Observation | None
    attempts: list[FailureAttempt]
    notes: list[Note]
    acknowledged: Acknowledgement | None


class IncidentAmounts(BaseModel):
    """What an incident costs, and how late it is (``Incident``)."""

    cost: IncidentCost
    counterfactuals: list[Counterfactual]
    usual_s: float | None = None
    stuck_s: float | None = None


class Incident(IncidentAmounts, IncidentFacts):
    """A fault. ``resumed_at``: end of the interrupted step; ``restored_at``: return to planned strength.

    ``closed_at``: when nothing was left to do. A fault from which a task did not recover has that time alone, and
    ``failed_tasks`` says why. ``usual_s``: of an open one, the median time of healed ones of its kind; null: there is
    none, and ten minutes count. ``stuck_s``: by how much longer an open one takes; null: it is not stuck.

    ``task``: of a fault of one task; null for a node's. ``tasks``: all that the fault hit or its plans changed.
    ``counterfactuals``: models of other answers. ``observations``: what ranks and methods saw of it, if more than one
    did; ``omitted``: how many more there were; ``root_cause``: the one that the others follow from. ``attempts``: how
    often the same failure came in a row, the first included; those of one generation are of ranks that failed alike.
    ``notes``: what users have written about it; ``acknowledged``: who takes care of it.
    """


class PlanSummary(BaseModel):
    """A plan without the problem and the alternatives that it was decided from.

    ``incident``: of its cause; ``beside``: of the losses that were found at the same moment.
    """

    id: str
    trigger: Trigger
    cause: str
    incident: str | None
    beside: list[str]
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


ShownNodeState = NodeState | Literal["unreachable"]
"""State of a node: that of the log, or ``unreachable``: takes part by the log, and is not heard by the detector now."""


class Node(BaseModel):
    """A node. ``reason``: of a state other than ready. ``recorded_state``: that of the log, also while it is silent.

    ``incarnation``: of its agent, new for every start of one. ``hardware``: kind of its workers: a profile of the
    throughput model, ``cpu`` without devices. ``devices``: of the node. ``reports``: of monitors from outside, those
    that have not expired.
    """

    name: str
    state: ShownNodeState
    recorded_state: NodeState
    reason: str
    incarnation: str
    agent_pid: int
    domain: str
    hardware: str = "cpu"
    workers: list[NodeWorker]
    joined_at: Time
    last_heartbeat_at: Time | None
    devices: list[NodeDevice] = Field(default_factory=list)
    reports: list[NodeReport] = Field(default_factory=list)


class NodeReport(BaseModel):
    """A trouble of a node that a monitor from outside has reported. ``actor``: the monitor, by its token.

    ``key``: the monitor's name for it. A ``warning`` has the node drained, an ``error`` has it isolated until an
    operator returns it. ``reported_at``: when last. ``deadline_at``: when the node goes away in any case; null: nobody
    has said so. ``answer``: what has followed; null: nothing yet. ``held``: why nothing follows, in words.
    """

    actor: str
    key: str
    severity: ReportSeverity
    reason: str
    evidence: dict[str, Any]
    reported_at: Time
    expires_at: Time
    deadline_at: Time | None
    answer: Literal["drained", "isolated", "overruled"] | None
    held: str


class ReportRequest(BaseModel):
    """A trouble of a node. ``key``, ``severity``, ``reason``, ``evidence``: as the report shows them.

    ``expires_s``: for how long the report counts, unless it is sent again. ``deadline_s``: in how many seconds the node
    goes away in any case; null: nobody has said so.
    """

    model_config = ConfigDict(extra="forbid")

    key: str = Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")
    severity: ReportSeverity
    reason: str = Field(default="", max_length=200)
    evidence: dict[str, Any] = Field(default_factory=dict)
    expires_s: float = Field(default=3600.0, ge=60, le=86_400)
    deadline_s: float | None = Field(default=None, ge=0, le=30 * 86_400)


class NodeRequest(BaseModel):
    """What a user asks of a node. ``reason``: in words, for other people."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="", max_length=200)


class DrainRequest(NodeRequest):
    """``timeout_s``: how long tasks may take to move away; null: the setting ``drain_timeout_s``."""

    timeout_s: float | None = Field(default=None, ge=0, le=86_400)


class NodeFault(BaseModel):
    """A fault of a node, at once. ``fault``: ``disconnect[=SECONDS|forever]`` or ``xid=CODE[:DEVICE]``."""

    model_config = ConfigDict(extra="forbid")

    fault: str = Field(max_length=300)


class RankFault(NodeFault):
    """A fault of a rank. ``fault``: one of ``kill``, ``exception``, ``hang``, ``slow``, ``nan``, ``spike``, ``oom``.

    ``step``: at which it is to happen; null: the next one that the rank begins.
    """

    rank: int = Field(ge=0, le=1_000_000)
    step: int | None = Field(default=None, ge=1, le=2**53)


class InjectedFault(BaseModel):
    """A fault that is on its way, as it is in the log. ``id``: of its event. ``worker``: of a fault of a rank."""

    id: str
    fault: str
    task: str | None
    rank: int | None
    step: int | None
    worker: str | None
    node: str
    actor: str
    at: Time


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


class BrowserLink(BaseModel):
    """A link that begins a browser's session. ``path``: on this server; who has it can open it, once."""

    path: str
    expires_at: Time


class EndedSessions(BaseModel):
    """Answer to the request to end sessions. ``ended``: how many there were."""

    ended: int


class NodeWorker(BaseModel):
    """A worker slot. ``slowdown``: as of a rank; the newest that was measured, whatever it does now.

    ``device``: of ``devices`` of the node; null: the worker has none, or its agent has not said yet which.
    """

    worker: str
    task: str | None
    rank: int | None
    state: str
    slowdown: float = 1.0
    device: int | None = None


class NodeDevice(BaseModel):
    """A device of a node. ``device``: NVML's index. ``notes``: what is unusual and breaks nothing, in words.

    ``faults``: how often each fault has come since the agent started: Xid codes (``xid-79``) and conditions. ``name``:
    of the product. ``memory_bytes``: all that it has. ``driver``: version. ``workers``: that have the device or a part
    of it. ``temperature_c``, ``utilisation_percent`` (of the time in which a kernel ran), ``memory_used_bytes``: at the
    agent's newest look, every 5 s. Null: the driver does not say.
    """

    device: int
    uuid: str
    notes: list[str]
    faults: dict[str, int]
    name: str = ""
    workers: list[str] = Field(default_factory=list)
    memory_bytes: int | None = None
    driver: str = ""
    temperature_c: int | None = None
    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None


class SlowWorker(BaseModel):
    """A slowdown of a worker. The task trains on, so it is no incident.

    ``slowdown``: own compute time over that of its peers, as measured last; ``worst``: the largest. ``task``,
    ``generation``, ``rank``, ``step``: in which it was found. ``ended``: why it is over, in words; null: it is not.
    ``plans``: that answered it. ``position``: of the event that found it in the log.
    """

    id: str
    worker: str
    node: str
    task: str
    generation: int
    rank: int | None
    step: int
    slowdown: float
    worst: float
    found_at: Time
    ended_at: Time | None
    ended: str | None
    plans: list[str]
    evidence: dict[str, Any]
    position: int


class CheckpointFailure(BaseModel):
    """A checkpoint that could not be written. ``worker``: the one that reported it."""

    step: int
    worker: str
    reason: str
    at: Time


class CopiesLack(BaseModel):
    """In-memory copies that a recovery would rely on are missing. ``worker``: the one that reported it."""

    step: int
    worker: str
    reason: str
    at: Time


class StopRefusal(BaseModel):
    """Why a task has not stopped as asked: the checkpoint of ``step`` could not be written."""

    step: int
    reason: str
    at: Time


class TaskWait(BaseModel):
    """Why no process of a task is started. ``until``: when that ends by itself; null: when an operator resumes it."""

    reason: str
    until: Time | None


class WorkersChange(BaseModel):
    """``min``, ``max``: of the task's workers; ``max`` null: any number. What is left out stays."""

    model_config = ConfigDict(extra="forbid")

    min: Count = 1
    max: Count | None = None


class TaskChange(BaseModel):
    """A JSON merge patch (RFC 7396) of a task's specification. What is left out stays."""

    model_config = ConfigDict(extra="forbid")

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    workers: WorkersChange = WorkersChange()


class NoteRequest(BaseModel):
    """A note about an incident."""

    model_config = ConfigDict(extra="forbid")

    text: NoteText
