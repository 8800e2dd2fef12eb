"""What the projections hold: one document for each task, incident, plan and node, folded from the log."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from shared.cost import Impact
from shared.model import Model
from shared.plans import Layout, Member, Response, Stage, Trigger
from shared.severities import ErrorKind, Method, Severity
from shared.tasks import TaskSpec, TaskState

SCHEMA_VERSION = 3
"""Raised whenever a document or the fold changes; the projections are then folded again from position 0."""

SHORTEST_STEP_S = 1e-6
"""A step time below this is no measurement (a step is at least some kernel launches), and would give rates that no
float holds."""


class Result(Model):
    """What a task that succeeded leaves behind."""

    steps: int
    samples_sha256: str
    parameters_path: str


class TaskView(Model):
    """A task. ``earlier_flop``: of updates under earlier submissions, up to ``first_step``.

    ``position``: of its (latest) submission; ``version``: of its stream, for expected-version appends.

    ``stages``: of the newest plan; one counts from its milestone on. ``members``: ranks of the generation that trains
    (or last trained). ``planned``: workers the newest plan aims for. ``strength``: workers it had before a fault took
    some; below it the task is degraded. ``plan``: the plan that is not done with it, if any. ``training_plan``: the
    plan whose training goes on. ``pausing``: the newest plan takes its workers, and it is to go on later.
    ``checkpoint``: the newest published one, of step ``checkpoint_step``. ``step_s``: the newest measured step time; 0
    until one was measured.
    """

    name: str
    position: int
    version: int
    submission_id: str
    submitted_at: datetime
    spec: TaskSpec
    state: TaskState = TaskState.PENDING
    reason: str = ""
    step: int = 0
    first_step: int = 0
    earlier_flop: float = 0.0
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
    loss: float | None = None
    checkpoint: str = ""
    checkpoint_step: int = 0
    result: Result | None = None
    traceback: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def update_flop(self) -> float:
        """Model FLOP of one update."""
        return self.spec.batch.global_ * self.spec.model.flop_per_sample()

    def flop(self, step: int) -> float:
        """Return the model FLOP of the updates up to ``step``, those under earlier submissions included."""
        return self.earlier_flop + max(step - self.first_step, 0) * self.update_flop


class IncidentView(Model):
    """A fault and what followed. ``plans``: those that answered it, in order; ``tasks``: those they touched."""

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
    response: str = ""
    state_source: str = ""
    steps_recomputed: int = 0
    evidence: dict[str, Any] = Field(default_factory=dict)
    plans: list[str] = Field(default_factory=list)
    tasks: list[str] = Field(default_factory=list)


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


class PlanView(Model):
    """A plan. The event itself, with the problem and the alternatives, stays in the log at ``position``.

    ``incidents``: those it has to heal, its own and those of the plans it supersedes.
    """

    id: str
    position: int
    decided_at: datetime
    trigger: Trigger
    cause: str
    incident: str | None
    incidents: list[str]
    response: Response
    supersedes: list[str]
    superseded_by: str | None = None
    state: PlanState = PlanState.OUTSTANDING
    outstanding: list[str]
    impacts: dict[str, Impact]
    queued: dict[str, str]
    milestones: list[Milestone] = Field(default_factory=list)


class NodeView(Model):
    """A node. ``state``: ready, lost (heartbeats stopped) or isolated (SEV1)."""

    name: str
    position: int
    state: str = "ready"
    reason: str = ""
    incarnation: str
    agent_pid: int
    domain: str
    workers: list[str]
    joined_at: datetime


class ClusterView(Model):
    """Parameters of the cluster that costs need."""

    name: str = "cluster"
    position: int = 0
    price_per_worker_hour: float = 0.0
    currency: str = "USD"


@dataclass
class Views:
    """The documents by their key. The fold reads and writes these mappings; in the service they are tables."""

    tasks: MutableMapping[str, TaskView] = field(default_factory=dict)
    incidents: MutableMapping[str, IncidentView] = field(default_factory=dict)
    plans: MutableMapping[str, PlanView] = field(default_factory=dict)
    nodes: MutableMapping[str, NodeView] = field(default_factory=dict)
    cluster: MutableMapping[str, ClusterView] = field(default_factory=dict)
