"""The events of the log: one discriminated union of pydantic models, each with a schema version.

An event is a fact that a decision used or made. Telemetry (heartbeats, single steps) stays out of the log; the events
here summarise it. The id of an event that follows from another event is derived from that event's id (``derived_id``),
so handling a cause twice appends its effect once. Events of older schema versions are upcast when they are parsed
(``shared.events.upcast``). ``shared.log`` stores events; every service folds them. ``base.py`` has what all
events have, ``node_events.py`` the events of nodes, ``observed_events.py`` those of observations, and
``request_events.py`` what users ask of tasks that exist and say of incidents; all are imported from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from shared.events.base import ClusterEvent, TaskEvent
from shared.events.base import EventBase as EventBase
from shared.events.base import NodeEvent as NodeEvent
from shared.events.base import derived_id as derived_id
from shared.events.codes import ReceivedCode
from shared.events.node_events import NodeAdopted as NodeAdopted
from shared.events.node_events import NodeCordoned as NodeCordoned
from shared.events.node_events import NodeDrained as NodeDrained
from shared.events.node_events import NodeDraining as NodeDraining
from shared.events.node_events import NodeJoined as NodeJoined
from shared.events.node_events import NodeLeft as NodeLeft
from shared.events.node_events import NodeMeasured as NodeMeasured
from shared.events.node_events import NodeReported as NodeReported
from shared.events.node_events import NodeReportHeld as NodeReportHeld
from shared.events.node_events import NodeReturned as NodeReturned
from shared.events.observed_events import AnomalyObserved as AnomalyObserved
from shared.events.observed_events import FaultInjected as FaultInjected
from shared.events.observed_events import IncidentObserved as IncidentObserved
from shared.events.observed_events import Observation as Observation
from shared.events.observed_events import TaskCheckpointFailed as TaskCheckpointFailed
from shared.events.observed_events import TaskCopiesLacking as TaskCopiesLacking
from shared.events.observed_events import TaskIdentified as TaskIdentified
from shared.events.observed_events import TaskResultUnwritten as TaskResultUnwritten
from shared.events.observed_events import WorkerSlowed as WorkerSlowed
from shared.events.plans import LoggedTable, Problem, Response, SlowWorkers, Solution, TaskChange, Trigger
from shared.events.request_events import IncidentAcknowledged as IncidentAcknowledged
from shared.events.request_events import IncidentNoted as IncidentNoted
from shared.events.request_events import TaskChanged as TaskChanged
from shared.events.request_events import TaskDeleted as TaskDeleted
from shared.events.request_events import TaskResumeRequested as TaskResumeRequested
from shared.events.request_events import TaskStopRequested as TaskStopRequested
from shared.events.request_events import TroubleAcknowledged as TroubleAcknowledged
from shared.events.request_events import TroubleEnded as TroubleEnded
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.upcast import upcast_given
from shared.events.worker_runs import short_members, short_workers
from shared.model import Model, canonical_json
from shared.tasks.specification import TaskSpec


class ClusterConfigured(ClusterEvent):
    """The parameters that decisions use from this event on. The planner appends it at start if they have changed.

    ``mtbf_node_s``: mean time between failures of one node. ``throughput_hysteresis``: relative change below which
    a measurement leaves the model's correction as it is. ``transition_prior_s``: the duration of a transition that is
    assumed until one has been measured. ``worker_flop_per_s``: the rate that one worker is assumed to achieve until it
    is measured. ``price_per_worker_hour``: the price in ``currency``. ``storage_bytes_per_s``: the rate at which a
    worker reads a checkpoint. ``starvation_s``: a task that has waited this long for workers comes before running
    tasks; 0: never. ``allow_pausing``: whether a running task may lose all its workers to a task with a higher weight.
    ``policy``: the policy that decides in a simulated history; empty: Unicron's own, as in every log of a running
    system. ``memory_copies``: whether plans count on snapshots in memory where replicas span workers. ``prices``: the
    price of a worker-hour by kind, in place of ``price_per_worker_hour``. ``value_per_eflop``: the value of 1e18 FLOP;
    0: nothing is priced. ``decider``: who decides from here on (``PlanDecided.decider``); 0: not said.
    """

    type: Literal["cluster.configured"] = "cluster.configured"
    schema_version: Literal[3] = 3
    mtbf_node_s: float
    throughput_hysteresis: float
    transition_prior_s: float
    worker_flop_per_s: float
    price_per_worker_hour: float
    currency: str
    storage_bytes_per_s: float = 1e9
    starvation_s: float = 0.0
    allow_pausing: bool = False
    policy: str = Field(default="", exclude_if=lambda policy: policy == "")
    memory_copies: bool = False
    prices: dict[str, float] = Field(default_factory=dict, exclude_if=lambda prices: not prices)
    value_per_eflop: float = Field(default=0.0, exclude_if=lambda value: value == 0.0)
    decider: int = Field(default=0, exclude_if=lambda decider: decider == 0)


class TaskSubmitted(TaskEvent):
    """A task was accepted. ``checkpoint``, ``step``: the published checkpoint that the task resumes from, if any.

    ``resumes``: whether it was asked to go on, and not submitted by its specification. Then it also goes on from copies
    in memory where there is no checkpoint.
    ``actor``: who submitted it, ``uid/<uid>`` or ``token/<name>``; empty: before actors were recorded.
    """

    type: Literal["task.submitted"] = "task.submitted"
    schema_version: Literal[2] = 2
    spec: TaskSpec
    checkpoint: str = ""
    step: int = 0
    resumes: bool = False
    actor: str = ""


class TaskStopRefused(TaskEvent):
    """The task has not stopped as asked, since its state could not be saved; it trains on.

    ``plan``: the plan that was to stop it. ``reason``: why the checkpoint of ``step`` could not be written, in words.
    """

    type: Literal["task.stop-refused"] = "task.stop-refused"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    plan: str
    reason: str


class TaskStarving(TaskEvent):
    """A task has waited for workers longer than ``starvation_s``. A timer of the planner appends the event.

    ``since``: when the task began to wait.
    """

    type: Literal["task.starving"] = "task.starving"
    schema_version: Literal[1] = 1
    since: datetime


class TaskProgressed(TaskEvent):
    """A summary of the steps done. The detector appends it when the rate has changed, and at intervals.

    ``step``: updates applied. ``step_s``: median duration of recent steps of this generation; 0 if none was timed yet.
    ``memory_every``: steps between two copies in memory; 0: none. ``replicated``: whether other failure domains have
    the state too. Both None where rank 0 has not said so.
    """

    type: Literal["task.progressed"] = "task.progressed"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    workers: int
    step_s: float
    loss: float | None = None
    memory_every: int | None = Field(default=None, exclude_if=lambda value: value is None)
    replicated: bool | None = Field(default=None, exclude_if=lambda value: value is None)


class TaskCheckpointed(TaskEvent):
    """A checkpoint is complete at ``path``."""

    type: Literal["task.checkpointed"] = "task.checkpointed"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    path: str


class TaskStopped(TaskEvent):
    """The task stopped at a user's request, at ``step``.

    ``path``: its checkpoint; empty if the task never ran, or if ``lose_steps`` was asked for and it was not saved.
    """

    type: Literal["task.stopped"] = "task.stopped"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    path: str


class TaskFinished(TaskEvent):
    """The task finished its last step, or its script has ended it before that: ``step`` says where.

    ``samples_sha256``: chained digest of the ids of all samples, in the order of updates. ``worker``: on whose node the
    parameters are, at ``parameters_path``; empty in logs of early versions.
    """

    type: Literal["task.finished"] = "task.finished"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    samples_sha256: str
    parameters_path: str
    loss: float | None = None
    worker: str = ""


class TaskFailed(TaskEvent):
    """The task has ended as failed: the same failure came too often at the same step. No node is blamed."""

    type: Literal["task.failed"] = "task.failed"
    schema_version: Literal[1] = 1
    generation: int
    step: int
    reason: str
    traceback: str = ""
    incident: str = ""


class ErrorDetected(ClusterEvent):
    """The detector found a fault. An incident has one error event, and one for each escalation and each repetition.

    ``occurred_at``: the best estimate of the time of the fault. ``detected_at``: when the detector found it.
    ``evidence``: details for the reader of an incident; decisions use only the part that ``shared.events.evidence``
    models. ``escalates``: id of the error event whose response has failed; ``repeats``: id of the error event before,
    of the same failure. ``answered_with``: id of the last of the losses that were found at the same moment and logged
    together; the plan that answers that one answers them all.
    """

    type: Literal["error.detected"] = "error.detected"
    schema_version: Literal[1] = 1
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
    repeats: str | None = Field(default=None, exclude_if=lambda repeats: repeats is None)
    answered_with: str | None = Field(default=None, exclude_if=lambda last: last is None)


_LISTS = ("survivors", "failed", "release", "prepare")
_STAGES = ("interrupted", "target")
_WORKERS: Any = {"changes": {"__all__": {**dict.fromkeys(_LISTS, True), **{name: {"members"} for name in _STAGES}}}}
"""Fields that ``PlanDecided.canonical`` writes by itself: thousands of workers, for which no dictionaries are made
before."""


OLDEST_DECIDER = 7
"""The oldest decider (``services.planner.decide.DECIDER``) whose plans are readable; an older plan is refused."""


class PlanDecided(ClusterEvent):
    """The planner's answer to a trigger, with everything that the decision used (docs/planner.md).

    ``cause``: id of the event that triggered the plan; ``beside``: the incidents of the errors that were found at
    the same moment. ``problem`` and ``solution`` are set where the solver was asked. ``inputs_sha256``: digest of
    the problem's canonical JSON. ``supersedes``: the unfinished plans whose tasks this plan takes over. ``queued``:
    tasks that are left without workers, with the reason. ``decider``: number of the decision code that made the
    plan (``services.planner.decide.DECIDER``). ``tables``: throughput tables that the problem names, by digest,
    where no earlier plan has them (docs/log.md, "What a plan says once"). ``slow``: how slow workers are used,
    where there are some. ``checkpoint_every_s``: for each task that has workers once the plan is carried out, the
    time between two checkpoints that loses the least at the measured rate of losses
    (``services.planner.checkpoint_advice``), if the solver was asked.
    """

    type: Literal["plan.decided"] = "plan.decided"
    schema_version: Literal[2] = 2
    decider: int = Field(ge=OLDEST_DECIDER)
    plan: str
    trigger: Trigger
    cause: str
    incident: str | None = None
    beside: list[str] = Field(default_factory=list, exclude_if=lambda value: not value)
    response: Response
    supersedes: list[str] = Field(default_factory=list)
    changes: list[TaskChange]
    queued: dict[str, str] = Field(default_factory=dict)
    inputs_sha256: str = ""
    problem: Problem | None = None
    solution: Solution | None = None
    alternatives: list[Solution] = Field(default_factory=list)
    tables: dict[str, LoggedTable] = Field(default_factory=dict)
    slow: SlowWorkers | None = Field(default=None, exclude_if=lambda value: value is None)
    checkpoint_every_s: dict[str, float] = Field(default_factory=dict, exclude_if=lambda value: not value)

    def canonical(self) -> str:
        """Return the canonical JSON of the event, its workers as runs (``shared.events.worker_runs``)."""
        fields = self.model_dump(mode="json", by_alias=True, exclude=_WORKERS)
        for change, written in zip(self.changes, fields["changes"], strict=True):
            for name in _LISTS:
                written[name] = short_workers(getattr(change, name))
            for name in _STAGES:
                if (stage := getattr(change, name)) is not None:
                    written[name]["members"] = short_members(stage.members)
        return canonical_json(fields)


class StateMoved(ClusterEvent):
    """A phase of a plan has ended for one task. ``occurred_at`` is the end of the phase.

    ``phase``: ``held`` (survivors have left the step), ``prepared`` (processes are up), ``resumed`` (the interrupted
    step is done), ``drained``, ``released``, ``restored`` (the target stage has done its first step), ``ended`` (the
    task is stopped, paused or released for good) or ``failed``. ``step``: updates applied. ``durations_s``: the slowest
    rank's time of each sub-phase. ``sources``: worker -> where its state came from. ``pids``: in ``prepared``, worker
    -> the process that was started. ``complete``: whether nothing of the plan is left to do for this task. ``code``:
    the reason of a failure (the first, if there are several); decisions use it. ``failed_workers``: the workers to
    blame for a failure. ``detail``: the failure as text for people.
    """

    type: Literal["state.moved"] = "state.moved"
    schema_version: Literal[2] = 2
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
    code: ReceivedCode = None
    failed_workers: list[str] = Field(default_factory=list)
    detail: str = ""


Event = Annotated[
    ClusterConfigured
    | TaskSubmitted
    | TaskStopRequested
    | TaskResumeRequested
    | TaskStopRefused
    | TaskStarving
    | TaskIdentified
    | TaskProgressed
    | TaskCheckpointed
    | TaskCheckpointFailed
    | TaskCopiesLacking
    | TaskResultUnwritten
    | TaskStopped
    | TaskFinished
    | TaskFailed
    | TaskChanged
    | TaskDeleted
    | NodeJoined
    | NodeAdopted
    | NodeCordoned
    | NodeDraining
    | NodeDrained
    | NodeReturned
    | NodeReported
    | NodeReportHeld
    | NodeMeasured
    | NodeLeft
    | WorkerSlowed
    | AnomalyObserved
    | FaultInjected
    | IncidentObserved
    | IncidentNoted
    | IncidentAcknowledged
    | TroubleAcknowledged
    | TroubleEnded
    | ErrorDetected
    | PlanDecided
    | StateMoved,
    Field(discriminator="type"),
    BeforeValidator(upcast_given),
]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)

EVENT_CLASSES: tuple[type[Event], ...] = get_args(get_args(Event)[0])
"""The classes of all events."""

_PARSERS: Mapping[str, Callable[[str], Event]] = {
    kind.model_fields["type"].default: kind.__pydantic_validator__.validate_json for kind in EVENT_CLASSES
}
"""Event type -> the parser of its present schema alone."""


def parsed(kind: object, text: str) -> Event:
    """Return the event in a text, as ``EVENT.validate_json`` does; faster if its type is known beforehand.

    The type need not be found out then, and an event of the present schema need not be upcast. Any other text, and any
    that is wrong, goes to ``EVENT``.

    Args:
        kind: the type that the event is said to have.
        text: the event as JSON.

    Raises:
        ValidationError: it is no event.
        ValueError, TypeError: it is no text.
    """
    if isinstance(kind, str) and (parse := _PARSERS.get(kind)) is not None:
        try:
            event = parse(text)
            if "type" in event.model_fields_set:  # otherwise the text does not say its type
                return event
        except ValidationError:
            pass
    return EVENT.validate_json(text)


class Recorded(Model):
    """An event with its place in the log and its hashes (see ``shared.log.log``)."""

    position: int
    stream: str
    stream_version: int
    recorded_at: datetime
    event: Event
    previous_hash: str
    hash: str
