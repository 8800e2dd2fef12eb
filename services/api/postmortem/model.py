"""What a post-mortem says. Times are UTC; seconds and worker-seconds are those of the log and the cost report.

The worker-seconds of a slow worker's cost are a model's.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from shared.interface.models import Incident, SlowWorker
from shared.text import Time


class Moment(BaseModel):
    """A line of the time line.

    ``since_fault_s``: seconds since the fault. ``what``: in words. ``durations_s``: of the parts of a phase, by name.
    ``position``: of the record that says so in the log; None: it follows from another line's record.
    """

    at: Time
    since_fault_s: float
    what: str
    task: str = ""
    durations_s: dict[str, float] = Field(default_factory=dict)
    position: int | None = None


class Phase(BaseModel):
    """A part of the way from the fault to planned strength, and how long it took; None: it has not ended.

    ``position``: of the record in the log with which it ended; None: it has not ended, or no record says so.
    """

    name: str
    meaning: str
    duration_s: float | None
    position: int | None = None


class RankState(BaseModel):
    """Where a rank stood when the fault was found.

    ``step``: steps done. ``phase``: of the step. ``process``: state of its process, in words. ``idle_s``: seconds since
    its last progress.
    """

    worker: str
    rank: int | None
    step: int | None
    phase: str
    process: str
    idle_s: float | None


class FailedWorker(BaseModel):
    """A worker whose process the fault has stopped. ``generation``: of the task, when the fault struck."""

    task: str
    worker: str
    generation: int


class LastOutput(BaseModel):
    """The last lines that the process of a failed worker has printed; from the node, not from the log."""

    task: str
    worker: str
    text: str


class Injection(BaseModel):
    """A fault that a user had asked for, as a test, at the place of the incident and before it.

    ``before_s``: seconds from its record to the incident. ``position``: of the record.
    """

    fault: str
    actor: str
    before_s: float
    position: int


class OtherCount(BaseModel):
    """Another number of workers that a plan could have given a task.

    ``workers``: that number; None: there is none that the task could use. ``less_flop``: by how much the task's part of
    the objective is smaller, weighted FLOP; None where nothing is compared. ``reason``: why it was not chosen.
    """

    workers: int | None
    less_flop: float | None
    reason: str


class CountReason(BaseModel):
    """Why a task has as many workers as it has. ``fewer``, ``more``: the next useful numbers below and above."""

    task: str
    workers: int
    fewer: OtherCount
    more: OtherCount


class Replanned(BaseModel):
    """What re-planning would have given a task that was restarted or retried in place: a model.

    ``restored_flop``, ``shrunk_flop``: the task's part of the objective with its workers back, and with the next
    useful number below, ``shrunk_workers``; weighted FLOP. ``assignment``: what the solver gives all tasks without the
    workers that the fault stopped; empty: it has no answer. ``assignment_flop``, ``kept_flop``: the objective of all
    tasks so, and with the workers back. ``more``: the next useful number above. ``basis``: the plan whose problem the
    model takes.
    """

    task: str
    workers: int
    restored_flop: float
    shrunk_workers: int
    shrunk_flop: float
    assignment: dict[str, int]
    assignment_flop: float
    kept_flop: float
    more: OtherCount
    basis: str
    assumptions: list[str]


class DecidedPlan(BaseModel):
    """A plan that answered the incident.

    ``words``: as ``unicron plan show`` prints it. ``counts``: where the solver was asked, by task. ``unused_workers``:
    workers that it leaves without a task; None: the solver was not asked. ``note``: what the answer follows from.
    """

    id: str
    position: int
    decided_at: Time
    words: str
    note: str = ""
    counts: list[CountReason] = Field(default_factory=list)
    unused_workers: int | None = None
    replanned: list[Replanned] = Field(default_factory=list)


class Shortfall(BaseModel):
    """A time in which a task has fewer workers because of the incident.

    ``workers``, ``before``: that it went on with, and had before. ``until``: None: it lasts. ``position``: of
    the record in the log with which it ended.
    """

    task: str
    workers: int
    before: int
    since: Time
    until: Time | None
    position: int | None = None


class StateSource(BaseModel):
    """Where the members of a stage had their state from: ``workers`` by source. ``position``: of the record.

    ``move_s``: seconds in which members took what they lacked; None: not measured.
    """

    task: str
    phase: str
    generation: int
    workers: dict[str, list[str]]
    move_s: float | None = None
    position: int


class AlikeIncident(BaseModel):
    """An earlier incident that is like this one. ``in_common``: in words."""

    id: str
    occurred_at: Time
    kind: str
    severity: str
    where: str
    in_common: list[str]


class Alike(BaseModel):
    """Earlier incidents: the newest that have most in common. ``examined``: how many were compared."""

    examined: int
    same_kind: int
    same_node: int
    same_worker: int
    newest: list[AlikeIncident]


class FaultPage(BaseModel):
    """What the post-mortems of incidents and of slow workers have in common.

    Attributes:
        headline: what happened, in one sentence.
        standing: how it stands, in sentences.
        injected: the fault that somebody asked for before, as a test, and from which it followed.
        found: what saw it and how late, in words.
        statements: what the evidence says.
        detected: position in the log of the event that found it.
        last: position in the log of the last line of the time line.
        timeline: from its beginning on.
        phases: the parts of the way to the end of what plans did about it.
        plans: that answered it, in order.
        sources: where state came from.
        currency: of money.
        left_out: what the page does not have, and why; in words.
        as_of: the time that costs are computed for.
        position: of the log up to which the page knows it.
    """

    headline: str
    standing: list[str]
    injected: Injection | None = None
    found: str
    statements: list[str]
    detected: int
    last: int
    timeline: list[Moment]
    phases: list[Phase]
    plans: list[DecidedPlan]
    sources: list[StateSource]
    currency: str
    left_out: list[str] = Field(default_factory=list)
    as_of: Time
    position: int


class PostMortem(FaultPage):
    """The post-mortem of an incident.

    Attributes:
        incident: the incident as ``GET /v1/incidents/{id}`` shows it, its cost included.
        kind_words: what the incident's kind means.
        severity_words: what answer its severity has.
        ranks: where each rank stood when the fault was found.
        failed: workers whose processes the fault has stopped.
        outputs: the last lines that they have printed, as far as the evidence does not have them.
        closed: whether all tasks are back at planned strength, or have ended.
        todo: what there is to do about it, in sentences.
        shortfalls: times in which tasks have fewer workers because of it.
        alike: earlier incidents.
    """

    incident: Incident
    kind_words: str
    severity_words: str
    ranks: list[RankState]
    failed: list[FailedWorker]
    outputs: list[LastOutput] = Field(default_factory=list)
    closed: bool
    todo: list[str]
    shortfalls: list[Shortfall] = Field(default_factory=list)
    alike: Alike

    @property
    def evidence(self) -> dict[str, Any]:
        """The incident's evidence."""
        return self.incident.evidence


class SlowCost(BaseModel):
    """What a slow worker cost so far: a model, since no step failed and the task trained on.

    ``workers``: of the task, all of which wait in each step for the slow one. ``waited_worker_s``: while they waited;
    ``paused_worker_s``: from the decision until it was carried out, at most; ``unused_worker_s``: of the slow worker
    itself, once no task used it. ``money``: price of the three. ``further_hour_worker_s``: of each further hour in
    which the task would have waited. ``assumptions``: in words.
    """

    workers: int
    waited_worker_s: float
    paused_worker_s: float
    unused_worker_s: float
    money: float
    further_hour_worker_s: float
    assumptions: list[str]

    @property
    def worker_s(self) -> float:
        """Worker-seconds of all parts."""
        return self.waited_worker_s + self.paused_worker_s + self.unused_worker_s


class SlowWorkerPostMortem(FaultPage):
    """The post-mortem of a slow worker.

    Attributes:
        slow: the slowdown, as ``GET /v1/slow-workers/{id}`` shows it.
        began_at: since when the worker was slow; None: the log does not say.
        began: how that is known, in words.
        carried_out_at: when the newest of its plans was carried out; None: it is not, or there is none.
        cost: so far; None: the log does not say since when the worker was slow, or how long steps took before.
        before: earlier slowdowns of workers of the node, the newest first.
        incidents_before: earlier incidents of the node, the newest first.
    """

    slow: SlowWorker
    began_at: Time | None
    began: str
    carried_out_at: Time | None
    cost: SlowCost | None
    before: list[SlowWorker]
    incidents_before: list[AlikeIncident]

    @property
    def evidence(self) -> dict[str, Any]:
        """What was measured, as the log has it."""
        return self.slow.evidence
