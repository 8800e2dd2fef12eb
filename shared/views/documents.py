"""Views, the documents of the projections: one for each task, incident, plan and node, folded from the log."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from shared.events.node_events import ReportSeverity
from shared.events.plans import Layout, Member, Response, Stage, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import Observation
from shared.model import Model
from shared.tasks.specification import TaskSpec, TaskState
from shared.views.incident_parts import Acknowledgement, Attempt, Note, OtherAnswers, TakenCause, Usual
from shared.views.observed_views import OpenAnomaly, SlowdownView, SlowWorker
from shared.views.task_parts import AttemptView, TaskWait, Weighting, weighted_steps
from shared.views.task_parts import CheckpointFailure as CheckpointFailure
from shared.views.task_parts import CopiesLack as CopiesLack
from shared.views.task_parts import RateSample as RateSample
from shared.views.task_parts import Result as Result
from shared.views.task_parts import StopRefusal as StopRefusal

SCHEMA_VERSION = 23
"""Version of the documents and of the fold, raised whenever one of them changes; the projections are then folded again
from position 0."""

SHORTEST_STEP_S = 1e-6
"""Step times below this are ignored: a step is at least some kernel launches, and the rates would overflow a float."""


class TaskView(Model):
    """A task.

    ``position``: that of its latest submission in the log. ``version``: that of its stream, for expected-version
    appends. ``revision``: the version at the newest event that a user asked for, or that has ended the task: changes
    may be conditional on it. ``earlier_flop``, ``earlier_weighted_flop``: FLOP of the updates under earlier
    submissions, up to ``first_step``. ``weightings``: the weights of the updates behind it, once the weight was
    changed. ``attempt``: number of this submission of the name. ``start_checkpoint``: the checkpoint from which it
    began.

    ``stages``: those of the newest plan; a stage takes effect with its milestone. ``members``: ranks of the generation
    that trains (or last trained). ``planned``: workers of the newest plan. ``strength``: workers that the task had
    before a fault took some; with fewer it is degraded. ``plan``: the plan that is not done with the task, if any.
    ``training_plan``: the plan under which the task trains now. ``pausing``: the newest plan takes the task's workers;
    the task is to resume later. ``checkpoint``: the newest published one, of step ``checkpoint_step``.
    ``checkpoint_failure``: the newest that could not be written; None once one was written after it. ``unwritten``: its
    workers are lent until it can write its result. ``copies_lacking``: why copies in memory are missing; None: all are
    there, or none are taken. ``stop_refused``: the answer to the newest request to stop, if that was refused.
    ``lose_steps``: whether the task is to stop also without a checkpoint; ``at_once``: in the midst of a step.
    ``anomalies``: those that last. ``slow``: slow workers and their slowdowns, as measured in this task. ``step_s``:
    the newest measured step time in seconds; 0 until one was measured. ``memory_every``, ``replicated``: as in the
    newest ``task.progressed`` that has them. ``changed``: as in ``task.identified``. ``newcomers_refused``: why it
    takes no new processes. ``wait``: why no process is started now.

    ``rates``: the newest measured rates. ``modelled``: FLOP/s by the throughput model at the counts of workers that
    plans gave the task. ``demand``, ``progress``, ``shortfalls``: keys of the spans that last (``SpanView``).
    ``owner``: who submitted it. ``start_s``: how long the newest start from nothing took. ``counted_step``: the step up
    to which earlier spans count the progress. ``interrupted_progress``: key of the span of progress that a fault has
    ended, until the task trains again.
    """

    name: str
    position: int
    version: int
    submission_id: str
    submitted_at: datetime
    spec: TaskSpec
    owner: str = ""
    state: TaskState = TaskState.PENDING
    reason: str = ""
    step: int = 0
    first_step: int = 0
    earlier_flop: float = 0.0
    earlier_weighted_flop: float = 0.0
    weightings: list[Weighting] = Field(default_factory=list)
    revision: int = 0
    attempt: int = 1
    start_checkpoint: str = ""
    generation: int = 0
    layout: Layout | None = None
    stages: list[Stage] = Field(default_factory=list)
    members: list[Member] = Field(default_factory=list)
    pids: dict[str, int] = Field(default_factory=dict)
    failed_workers: list[str] = Field(default_factory=list)
    planned: list[str] = Field(default_factory=list)
    strength: int = 0
    plan: str = ""
    training_plan: str = ""
    pausing: bool = False
    queued_reason: str = ""
    step_s: float = 0.0
    memory_every: int | None = None
    replicated: bool | None = None
    start_s: float = 0.0
    rates: list[RateSample] = Field(default_factory=list)
    modelled: dict[int, float] = Field(default_factory=dict)
    demand: str = ""
    progress: str = ""
    counted_step: int = 0
    interrupted_progress: str = ""
    shortfalls: list[str] = Field(default_factory=list)
    loss: float | None = None
    checkpoint: str = ""
    checkpoint_step: int = 0
    checkpoint_failure: CheckpointFailure | None = None
    copies_lacking: CopiesLack | None = None
    unwritten: bool = False
    stop_refused: StopRefusal | None = None
    anomalies: list[OpenAnomaly] = Field(default_factory=list)
    slow: dict[str, float] = Field(default_factory=dict)
    changed: list[str] = Field(default_factory=list)
    newcomers_refused: str = ""
    wait: TaskWait | None = None
    lose_steps: bool = False
    at_once: bool = False
    result: Result | None = None
    traceback: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    deleted_at: datetime | None = None

    @property
    def may_go_on(self) -> bool:
        """Whether a further submission of the name takes the task over, with its checkpoint, though it has ended."""
        if self.state is TaskState.SUCCEEDED:
            return self.spec.ends_early_at(self.step)
        return self.state in (TaskState.STOPPED, TaskState.FAILED)

    @property
    def update_flop(self) -> float:
        """Model FLOP of one update."""
        return self.spec.batch.global_ * self.spec.model.flop_per_sample()

    def flop(self, step: int) -> float:
        """Return the model FLOP of the updates up to ``step``, those under earlier submissions included."""
        return self.earlier_flop + max(step - self.first_step, 0) * self.update_flop

    def weighted_flop(self, step: int) -> float:
        """Return the same, each update times the weight that the task had then."""
        weights = weighted_steps(self.weightings, self.first_step, step, self.spec.weight)
        return self.earlier_weighted_flop + weights * self.update_flop


class IncidentView(Model):
    """A fault and what followed. ``plans``: those that answered it, in order.

    ``tasks``: those that it hit (``task`` alone, or all on a lost or isolated node), and those that the plans changed.
    ``shortfalls``: keys of the spans in which tasks have fewer workers because of it (``SpanView``);
    ``past_shortfalls``: keys of those that have ended. ``failed_tasks``: tasks that failed because of it, and why.
    ``observations``, ``omitted``, ``root_cause``: as in ``incident.observed``. ``closed_at``: when nothing was left to
    do; ``restored_at``: the same, where every task that it hit trains again. ``attempts``: occurrences of the same
    failure.
    """

    id: str
    position: int
    kind: ErrorKind
    severity: Severity
    method: Method
    node: str | None = None
    worker: str | None = None
    task: str | None = None
    rank: int | None = None
    step: int | None = None
    occurred_at: datetime
    detected_at: datetime
    planned_at: datetime | None = None
    resumed_at: datetime | None = None
    restored_at: datetime | None = None
    closed_at: datetime | None = None
    response: str = ""
    state_source: str = ""
    steps_recomputed: int = 0
    evidence: dict[str, Any] = Field(default_factory=dict)
    plans: list[str] = Field(default_factory=list)
    tasks: list[str] = Field(default_factory=list)
    shortfalls: list[str] = Field(default_factory=list)
    past_shortfalls: list[str] = Field(default_factory=list)
    failed_tasks: dict[str, str] = Field(default_factory=dict)
    other_answers: OtherAnswers = OtherAnswers()
    observations: list[Observation] = Field(default_factory=list)
    omitted: int = 0
    root_cause: Observation | None = None
    attempts: list[Attempt] = Field(default_factory=list)
    notes: list[Note] = Field(default_factory=list)
    acknowledged: Acknowledgement | None = None


class PlanState(StrEnum):
    """How far a plan has come."""

    OUTSTANDING = "outstanding"
    DONE = "done"
    SUPERSEDED = "superseded"
    FAILED = "failed"


class Milestone(Model):
    """One state-moved event of a plan."""

    task: str
    phase: str
    generation: int
    step: int
    started_at: datetime
    occurred_at: datetime
    durations_s: dict[str, float] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
    deal: dict[str, list[int]] = Field(default_factory=dict)
    detail: str = ""


class Impact(Model):
    """What one plan did to one task: workers and times, from which costs are derived.

    ``before``, ``after``: workers that the task had and is to have. ``faulted``: the fault interrupted a step of this
    task. ``planned_at``: when the plan was decided. ``closed_at``: when nothing of the plan was left to do, or the next
    plan took the task over. ``until``: when the training that followed ended (None: it goes on). ``step_s``: time of a
    step of the workers after the plan. ``waf_flop_per_s``: weighted FLOP/s of all workers before it. Both are robust
    means (``shared/projections/rates.py``). ``weight``: the task's.

    For counterfactuals: ``step``, ``saved_step`` when the plan was made; ``step_before_s``: time of a step of the
    workers before; ``start_s``: how long the task's newest start from nothing took, 0 while unknown.
    """

    task: str
    before: list[str] = Field(default_factory=list)
    after: list[str] = Field(default_factory=list)
    survivors: list[str] = Field(default_factory=list)
    faulted: bool = False
    planned_at: datetime
    drained_at: datetime | None = None
    resumed_at: datetime | None = None
    restored_at: datetime | None = None
    closed_at: datetime | None = None
    until: datetime | None = None
    steps_recomputed: int = 0
    step_s: float = 0.0
    waf_flop_per_s: float = 0.0
    weight: float = 1.0
    step: int = 0
    saved_step: int = 0
    step_before_s: float = 0.0
    start_s: float = 0.0


class PlanView(Model):
    """A plan. The event itself, with the problem and the alternatives, stays in the log at ``position``.

    ``incidents``: those that the plan answers: its own, those of losses at the same moment (``beside``), and the open
    ones of the plans that it supersedes.
    ``outstanding``: tasks that the plan is not done with. ``impacts``: by task. ``queued``: why tasks wait, by task.
    ``since``: from when on it claims workers' time: when it was decided, or the first fault occurred that it is the
    first to answer for a task. ``detected_at``: when the last of its incidents was detected. ``solved``: whether the
    solver made it. ``gain_flop_per_s``: its WAF above that of the alternative in which only the failed tasks shrink;
    None where there is no such alternative. ``slowdowns``: ids of the slowdowns that it answers.
    """

    id: str
    position: int
    decided_at: datetime
    trigger: Trigger
    cause: str
    incident: str | None
    beside: list[str] = Field(default_factory=list)
    incidents: list[str]
    response: Response
    supersedes: list[str]
    superseded_by: str | None = None
    state: PlanState = PlanState.OUTSTANDING
    outstanding: list[str]
    impacts: dict[str, Impact]
    queued: dict[str, str]
    since: datetime | None = None
    detected_at: datetime | None = None
    solved: bool = False
    gain_flop_per_s: float | None = None
    milestones: list[Milestone] = Field(default_factory=list)
    slowdowns: list[str] = Field(default_factory=list)


class NodeState(StrEnum):
    """The state of a node."""

    READY = "ready"
    CORDONED = "cordoned"
    """A user wants no new work on the node; what runs there stays."""
    DRAINING = "draining"
    """Tasks move away from the node."""
    DRAINED = "drained"
    """No task has a process on the node, and none gets one."""
    ISOLATED = "isolated"
    """A fault of the node's processes went on after they had been restarted (SEV1)."""
    LOST = "lost"
    """The node has sent no heartbeats."""
    LEFT = "left"
    """The node's agent was asked to end."""


class NodeReport(Model):
    """What a monitor from outside has reported of a node (``NodeReported``, whose fields these are).

    ``reported_at``: when last. ``answer``: what has followed; None: nothing yet. ``held``: why nothing follows; empty:
    nothing is known to be in the way.
    """

    actor: str
    key: str
    severity: ReportSeverity
    reason: str
    evidence: dict[str, Any]
    reported_at: datetime
    expires_at: datetime
    deadline_at: datetime | None
    answer: Literal["drained", "isolated", "overruled"] | None = None
    held: str = ""

    @property
    def report(self) -> str:
        """What the report is called among those of its node (``NodeReported.report``)."""
        return f"{self.actor}/{self.key}"


class NodeView(Model):
    """A node.

    ``version``: that of its stream, for expected-version appends. ``cordoned``: a user wants no new work on it,
    whatever its state; that holds over incarnations. ``hardware``: the kind of its workers. ``kept_out``: whether only
    an operator returns it, whatever its agent does: it is a lemon, its link has broken too often, or a monitor has
    reported an error. ``preflight``: what its newest preflight has found slow, until somebody returns the node; empty:
    nothing. ``reports``: of monitors from outside, with those that have expired since the newest one came.
    ``span``: key of the span that lasts (``SpanView``); empty while the node is not allocated.
    ``allocated_worker_s``: worker-seconds up to ``allocated_since``, from which its workers are allocated; None while
    they are not. ``slow``: its slow workers.
    """

    name: str
    position: int
    version: int
    state: NodeState = NodeState.READY
    cordoned: bool = False
    kept_out: bool = False
    reason: str = ""
    preflight: str = ""
    reports: list[NodeReport] = Field(default_factory=list)
    incarnation: str
    agent_pid: int
    domain: str
    workers: list[str]
    hardware: str = "cpu"
    slow: list[SlowWorker] = Field(default_factory=list)
    joined_at: datetime
    span: str = ""
    allocated_since: datetime | None = None
    allocated_worker_s: float = 0.0


class SpanKind(StrEnum):
    """What holds during a span."""

    OPEN = "open"
    """A node takes work."""
    CLOSED = "closed"
    """A node is allocated and takes no new work: cordoned or draining."""
    AWAY = "away"
    """A node is lost or isolated, and stays allocated."""
    DEMAND = "demand"
    """A task could use more workers than it has."""
    SHORTFALL = "shortfall"
    """A task has fewer workers because of an incident."""
    PROGRESS = "progress"
    """A task goes from one step to another under one plan."""
    HEALTHY = "healthy"
    """The best plan on all allocated workers would achieve so much."""


class SpanView(Model):
    """A time in which something holds of a node or a task. ``end``: None while it lasts.

    ``workers``: all of the node; or those that the task has lost to the incident. ``hardware``: their kind; the kind
    that the task wants, empty for any. ``incident``: the incident that took the node or the workers. ``before``,
    ``after``: numbers of workers that the task had, and has instead: some of those lost may have been replaced.
    ``weight``: the task's; ``flop_per_worker_s``: its weighted FLOP/s of one worker.

    ``detected_at``: for an away node, when the incident was detected.
    ``first_step``, ``last_step``: those of progress, ``last_step`` once it has ended; ``flop_per_step``: weighted.
    ``waf``: weighted FLOP/s of the healthy line, by task.
    """

    id: str
    position: int
    kind: SpanKind
    start: datetime
    end: datetime | None = None
    node: str = ""
    task: str = ""
    incident: str = ""
    detected_at: datetime | None = None
    workers: list[str] = Field(default_factory=list)
    hardware: str = ""
    before: int = 0
    after: int = 0
    weight: float = 1.0
    flop_per_worker_s: float = 0.0
    first_step: int = 0
    last_step: int = 0
    flop_per_step: float = 0.0
    waf: dict[str, float] = Field(default_factory=dict)


class ClusterView(Model):
    """Parameters of the cluster from which costs are computed.

    ``away``: names of the nodes that are allocated and away. ``healthy``: key of the healthy line's span that lasts.
    ``usual``: how long the newest incidents took that were healed, by kind. ``taken``: who takes care of a cause of
    trouble that is no incident, by its key.
    """

    name: str = "cluster"
    position: int = 0
    price_per_worker_hour: float = 0.0
    currency: str = "USD"
    away: list[str] = Field(default_factory=list)
    healthy: str = ""
    usual: Usual = Field(default_factory=dict)
    taken: dict[str, TakenCause] = Field(default_factory=dict)


@dataclass
class Views:
    """The documents by their key. The fold reads and writes these mappings; the service has tables behind them."""

    tasks: MutableMapping[str, TaskView] = field(default_factory=dict)
    incidents: MutableMapping[str, IncidentView] = field(default_factory=dict)
    plans: MutableMapping[str, PlanView] = field(default_factory=dict)
    nodes: MutableMapping[str, NodeView] = field(default_factory=dict)
    cluster: MutableMapping[str, ClusterView] = field(default_factory=dict)
    spans: MutableMapping[str, SpanView] = field(default_factory=dict)
    attempts: MutableMapping[str, AttemptView] = field(default_factory=dict)
    slowdowns: MutableMapping[str, SlowdownView] = field(default_factory=dict)
