"""Every event the log can hold: one discriminated union of pydantic models, each with a schema version.

An event is a fact that some decision used or made. Telemetry (heartbeats, single steps) stays out of the log; the
summaries that decisions use are here. ``event_id`` of an event that follows from another is derived from it
(``derived_id``), so that handling a cause twice appends its effect once.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from shared.model import Model, canonical_json
from shared.plans import Problem, Response, Solution, TaskChange, Trigger
from shared.severities import ErrorKind, Method, Severity
from shared.tasks import TaskSpec

_NAMESPACE = uuid.UUID("6d9f2f1c-7a3e-5a52-9a55-3f0a3c1b7e10")


def derived_id(cause: str, service: str, index: int | str = 0) -> str:
    """Return the id of the ``index``-th event that ``service`` derives from ``cause``."""
    return str(uuid.uuid5(_NAMESPACE, f"{cause}/{service}/{index}"))


class EventBase(Model):
    """``occurred_at``: when it happened in the world (UTC); the log adds when it was recorded."""

    event_id: str
    schema_version: Literal[1] = 1
    occurred_at: datetime

    @property
    def stream(self) -> str:
        """The stream the event belongs to; its version counts the events in it."""
        raise NotImplementedError

    def canonical(self) -> str:
        """Return the canonical JSON of the event: what is stored, hashed and compared."""
        return canonical_json(self.model_dump(mode="json", by_alias=True))


class ClusterEvent(EventBase):
    """An event of the cluster as a whole."""

    @property
    def stream(self) -> str:
        """The cluster's stream."""
        return "cluster"


class TaskEvent(EventBase):
    """An event of one task."""

    task: str

    @property
    def stream(self) -> str:
        """The task's stream."""
        return f"task/{self.task}"


class NodeEvent(EventBase):
    """An event of one node."""

    node: str

    @property
    def stream(self) -> str:
        """The node's stream."""
        return f"node/{self.node}"


class ClusterConfigured(ClusterEvent):
    """Parameters that decisions use from here on. Logged by the planner when it starts and they have changed.

    ``mtbf_node_s``: mean time between failures of one node. ``throughput_hysteresis``: relative change below which
    a measurement leaves the model's correction as it is. ``transition_prior_s``: D_transition until one has been
    measured. ``worker_flop_per_s``: what one worker is assumed to achieve before it is measured.
    ``price_per_worker_hour``: in ``currency``. ``storage_bytes_per_s``: at which a worker reads a checkpoint.
    ``starvation_s``: a task that waited this long for workers comes before running ones; 0 never. ``allow_pausing``:
    whether a running task may lose all its workers to a heavier one.
    """

    type: Literal["cluster.configured"] = "cluster.configured"
    mtbf_node_s: float
    throughput_hysteresis: float
    transition_prior_s: float
    worker_flop_per_s: float
    price_per_worker_hour: float
    currency: str
    storage_bytes_per_s: float = 1e9
    starvation_s: float = 0.0
    allow_pausing: bool = False


class TaskSubmitted(TaskEvent):
    """A task was accepted. ``checkpoint``: the published checkpoint it goes on from, with its step, if any."""

    type: Literal["task.submitted"] = "task.submitted"
    spec: TaskSpec
    checkpoint: str = ""
    step: int = 0


class TaskStopRequested(TaskEvent):
    """A user wants the task to stop at the next step boundary."""

    type: Literal["task.stop-requested"] = "task.stop-requested"


class TaskStarving(TaskEvent):
    """A task has waited for workers longer than ``starvation_s``: a timer of the planner that fired and matters.

    ``since``: when it began to wait.
    """

    type: Literal["task.starving"] = "task.starving"
    since: datetime


class TaskProgressed(TaskEvent):
    """Summary of steps done, for decisions: appended when the rate has changed, or after some time.

    ``step_s``: median duration of recent steps of this generation; 0 when none was timed yet.
    """

    type: Literal["task.progressed"] = "task.progressed"
    generation: int
    step: int
    workers: int
    step_s: float
    loss: float | None = None


class TaskCheckpointed(TaskEvent):
    """A checkpoint exists from here on."""

    type: Literal["task.checkpointed"] = "task.checkpointed"
    generation: int
    step: int
    path: str


class TaskStopped(TaskEvent):
    """The task stopped as asked; ``path`` is its checkpoint (empty if it never ran)."""

    type: Literal["task.stopped"] = "task.stopped"
    generation: int
    step: int
    path: str


class TaskFinished(TaskEvent):
    """The task did all its steps. ``samples_sha256``: chained digest of the ids of all samples, in update order."""

    type: Literal["task.finished"] = "task.finished"
    generation: int
    step: int
    samples_sha256: str
    parameters_path: str
    loss: float | None = None


class TaskFailed(TaskEvent):
    """The task is given up: the same failure at the same step too often. No node is blamed."""

    type: Literal["task.failed"] = "task.failed"
    generation: int
    step: int
    reason: str
    traceback: str = ""
    incident: str = ""


class NodeJoined(NodeEvent):
    """A node (or a new incarnation of it) offers workers.

    ``domain``: what fails together (a rack). ``hardware``: the kind of its workers, a profile of the throughput model.
    """

    type: Literal["node.joined"] = "node.joined"
    incarnation: str
    agent_pid: int
    domain: str
    workers: list[str]
    hardware: str = "cpu"


class ErrorDetected(ClusterEvent):
    """Something failed. One incident, one error event; an escalation is a further one with the same ``incident``.

    ``occurred_at``: the best estimate of the fault's time; ``detected_at``: when the detector knew. ``escalates``:
    the id of the error event whose response failed.
    """

    type: Literal["error.detected"] = "error.detected"
    incident: str
    kind: ErrorKind
    severity: Severity
    method: Method
    detected_at: datetime
    node: str | None = None
    worker: str | None = None
    task: str | None = None
    rank: int | None = None
    generation: int | None = None
    step: int | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)
    escalates: str | None = None


class PlanDecided(ClusterEvent):
    """The answer to a trigger, with everything the decision used (DESIGN sections 3 and 7).

    ``cause``: id of the event that triggered it. ``problem`` and ``solution`` are set where the solver was asked.
    ``inputs_sha256``: digest of the problem's canonical JSON. ``supersedes``: plans not yet done whose tasks this one
    takes over.
    """

    type: Literal["plan.decided"] = "plan.decided"
    plan: str
    trigger: Trigger
    cause: str
    incident: str | None = None
    response: Response
    supersedes: list[str] = Field(default_factory=list)
    changes: list[TaskChange]
    queued: dict[str, str] = Field(default_factory=dict)
    """Tasks left without workers, with the reason."""
    inputs_sha256: str = ""
    problem: Problem | None = None
    solution: Solution | None = None
    alternatives: list[Solution] = Field(default_factory=list)


class StateMoved(ClusterEvent):
    """One milestone of a plan for one task. ``occurred_at`` is its end.

    ``phase``: ``held`` (survivors left the step), ``prepared`` (processes are up), ``resumed`` (the interrupted step
    is done), ``drained``, ``released``, ``restored`` (the target stage did its first step), ``ended`` (stopped, paused
    or released for good) or ``failed``. ``durations_s``: the slowest rank's time of each sub-phase. ``sources``:
    worker -> where its state came from. ``complete``: nothing of the plan is left to do for this task.
    ``step``: updates applied.
    """

    type: Literal["state.moved"] = "state.moved"
    plan: str
    task: str
    incident: str | None = None
    generation: int
    phase: Literal["held", "prepared", "resumed", "drained", "released", "restored", "ended", "failed"]
    started_at: datetime
    step: int = 0
    durations_s: dict[str, float] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
    pids: dict[str, int] = Field(default_factory=dict)
    deal: dict[str, list[int]] = Field(default_factory=dict)
    steps_recomputed: int = 0
    complete: bool = False
    failed_workers: list[str] = Field(default_factory=list)
    detail: str = ""


Event = Annotated[
    ClusterConfigured
    | TaskSubmitted
    | TaskStopRequested
    | TaskStarving
    | TaskProgressed
    | TaskCheckpointed
    | TaskStopped
    | TaskFinished
    | TaskFailed
    | NodeJoined
    | ErrorDetected
    | PlanDecided
    | StateMoved,
    Field(discriminator="type"),
]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class Recorded(Model):
    """An event with its place in the log."""

    position: int
    stream: str
    stream_version: int
    recorded_at: datetime
    event: Event
    previous_hash: str
    hash: str
