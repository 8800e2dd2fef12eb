"""A task as the detector knows it: what the log has of it, and its telemetry."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from datetime import datetime
from statistics import pstdev

from pydantic import InstanceOf

from services.detector.state.anomalies import OpenAnomaly
from services.detector.state.known_errors import FailureHistory, KnownError
from services.detector.state.node import Place
from services.detector.state.progress_gaps import ProgressGaps, ProgressHistory
from services.detector.state.regressions import TaskRates
from services.detector.state.step_statistics import StepStatistics
from services.detector.state.unlogged import Inquiry
from shared.events.plans import Layout, Member, Stage, TaskChange
from shared.events.union import StateMoved
from shared.messages.signals import RankRaised
from shared.messages.stacks import RankReport
from shared.service.state_codec import Unlogged
from shared.tasks.specification import DEFAULT_FINISH_TIMEOUT_S, DEFAULT_PROGRESS_TIMEOUT_S

RECENT_STEPS = 32
"""Step durations kept for the mean and the median: enough to be steady, few enough to follow a real change."""


@dataclass(slots=True)
class Suspicion:
    """Ranks of one generation whose collectives broke, while no cause is known. ``at``: the first signal."""

    generation: int
    at: datetime
    signals: list[RankRaised]


@dataclass(slots=True)
class Standstill:
    """What is known of a task that seems to stand still (``standstill.py``).

    Attributes:
        generation: its ranks' generation.
        asked_at: when their nodes were asked last what they do.
        reports: worker -> the newest answer.
    """

    generation: int
    asked_at: datetime
    reports: dict[str, RankReport] = field(default_factory=dict)


@dataclass(slots=True)
class MonitoredTask:
    """A task.

    Attributes:
        name: the task's name.
        max_restarts: from its specification.
        weight: from its specification.
        min_workers: how many workers it needs at least.
        finish_timeout_s: from its specification.
        progress_timeout_s: from its specification.
        generation: that of the newest stage known to have resumed.
        highest_generation: the highest that any plan has named. Agents may have seen it, and refuse older commands.
        members: worker -> member of that stage.
        layout: that stage's.
        has_trained: whether any stage has resumed since the task was submitted.
        restarts_whole: from its specification.
        plan: id of the newest plan that changes the task.
        cause: the error that this plan answers; None if it answers another kind of event.
        change: the part of that plan that is still to be done; None if nothing is.
        ended: the task has finished, stopped or failed.
        is_saved: whether what it has done is saved, since it was paused so; false while it trains.
        discards: whether a user wants it to stop also if steps are lost.
        copies_until: until when its nodes keep its copies in memory; None: they keep none, once it has ended.
        step: updates applied.
        covered: worker -> the generation up to which a failure of the worker belongs to a known incident.
        failures: how the task has failed so far.
        unanswered: ids of the events (errors, nodes that left) that concern the task and no plan has answered yet.
        failed_transition: the event that the outstanding plan could not be carried out, until it is judged.
        suspicion: broken collectives without a known cause.
        recorded: event id -> generation of the checkpoints, stops, results and errors that the log has and that may be
            found again.
        checkpoint_failures: kinds of the failures of checkpoints that the log has since the last one that was written.
        copies_lacking: kinds of the lacks of copies in memory that the log has since all ranks had stored theirs.
        copied: generation and step of the newest copies that all ranks are known to have stored.
        lent: how often its workers went to others, since it was submitted, until it could write its result.
        identity: what its members have agreed to be since it was submitted; empty: not known.
        identity_before: the same, of the submission before.
        setup_s: the longest time that its ranks have taken to join a generation, seconds.
        cold_s: the longest first step of a generation with processes that were started for it, seconds; None: there was
            none since the task was submitted.
        durations_s: durations of the recent steps of this generation, seconds.
        timed: how many steps of this generation were timed.
        progress: for how long its ranks went without progress, in each layout.
        previous_mean_s: the mean step of the generation before, seconds.
        previous_size: the number of workers of the generation before.
        progressed_at: time of the newest ``task.progressed`` event, with its generation and step.
        progressed_generation: see ``progressed_at``.
        progressed_step: see ``progressed_at``.
        progressed_step_s: its step time, seconds.
        progressed_timed: how many steps of the generation were timed by then.
        rate_since: since when the rate is the same, as far as this detector knows.
        absent_since: members of which their node reports no process, and since when (``absences.py``).
        inquiry: the newest inquiry among its nodes whose fault has not been judged yet.
        inquiries: number of inquiries, without those that repeat one.
        round_trip_s: the longest round trip between two of its nodes, in the newest inquiry that had an answer.
        anomalies: the anomalies that last, by key (``anomalies.py``).
        rates: step times of its layouts (``regressions.py``).
        statistics: the statistics of its ranks' steps.
    """

    name: str
    max_restarts: int
    weight: float = 1.0
    min_workers: int = 1
    finish_timeout_s: float = DEFAULT_FINISH_TIMEOUT_S
    progress_timeout_s: float = DEFAULT_PROGRESS_TIMEOUT_S
    generation: int = 0
    highest_generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    layout: Layout | None = None
    has_trained: bool = False
    restarts_whole: bool = False
    plan: str | None = None
    cause: KnownError | None = None
    change: TaskChange | None = None
    ended: bool = False
    is_saved: bool = False
    discards: bool = False
    copies_until: datetime | None = None
    step: int = 0
    covered: dict[str, int] = field(default_factory=dict)
    failures: FailureHistory = field(default_factory=FailureHistory)
    unanswered: set[str] = field(default_factory=set)
    failed_transition: StateMoved | None = None
    suspicion: Suspicion | None = None
    recorded: dict[str, int] = field(default_factory=dict)
    checkpoint_failures: set[str] = field(default_factory=set)
    copies_lacking: set[str] = field(default_factory=set)
    lent: int = 0
    identity: dict[str, str] = field(default_factory=dict)
    identity_before: dict[str, str] = field(default_factory=dict)
    setup_s: float | None = None
    cold_s: float | None = None
    # Telemetry and its summaries
    durations_s: Unlogged[deque[float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    timed: int = 0
    copied: tuple[int, int] = (0, 0)
    progress: Unlogged[InstanceOf[ProgressHistory]] = field(default_factory=ProgressHistory, compare=False, repr=False)
    previous_mean_s: float | None = None
    previous_size: int = 0
    progressed_at: datetime | None = None
    progressed_generation: int = -1
    progressed_step: int = -1
    progressed_step_s: float = 0.0
    progressed_timed: int = 0
    rate_since: datetime | None = None
    absent_since: dict[str, datetime] = field(default_factory=dict)
    inquiry: Inquiry | None = None
    inquiries: int = 0
    round_trip_s: float = 0.0
    anomalies: dict[str, OpenAnomaly] = field(default_factory=dict)
    rates: TaskRates = field(default_factory=TaskRates)
    statistics: Unlogged[StepStatistics] = field(default_factory=StepStatistics, compare=False, repr=False)
    _concerned: Unlogged[tuple[TaskChange, frozenset[str]] | None] = field(default=None, compare=False, repr=False)
    """The plan's change for which ``concerned`` was computed last, and the workers."""
    _on_nodes: Unlogged[tuple[dict[str, Member], TaskChange | None, dict[str, list[str]]] | None] = field(
        default=None, compare=False, repr=False
    )
    _nodes: Unlogged[tuple[dict[str, Member], list[str]] | None] = field(default=None, compare=False, repr=False)
    places: Unlogged[tuple[dict[str, Member], TaskChange | None, dict[str, Place]] | None] = field(
        default=None, compare=False, repr=False
    )
    """The members and the plan's change for which ``calm.py`` has listed the workers of each node, and these."""

    def forget_older_generations(self) -> None:
        """Leave out the recorded events that cannot be found again: faults and signals of older generations."""
        self.recorded = {event_id: of for event_id, of in self.recorded.items() if of >= self.generation}

    def cover(self, worker: str, generation: int) -> None:
        """Note that failures of the worker up to this generation belong to a known incident."""
        self.covered[worker] = max(self.covered.get(worker, -1), generation)

    def concerned(self) -> Set[str]:
        """Return the workers whose processes matter to the task now.

        The method is called for each worker of a large task, so the set is computed once for each plan.
        """
        if self.change is None:
            return self.members.keys()
        change = self.change
        if self._concerned is None or self._concerned[0] is not change:
            workers = {*change.survivors, *change.prepare, *change.release}
            workers |= {m.worker for stage in self.stages() for m in stage.members}
            self._concerned = change, frozenset(workers)
        return self._concerned[1]

    def workers_on(self, node: str) -> list[str]:
        """Return the workers of a node that matter to the task now, sorted; none once the task has ended."""
        return [] if self.ended else self._by_node().get(node, [])

    def _by_node(self) -> dict[str, list[str]]:
        """Return the workers that matter to the task now, sorted, by node; computed once for each plan and stage."""
        known = self._on_nodes
        if known is None or known[0] is not self.members or known[1] is not self.change:
            found: dict[str, list[str]] = {}
            for worker in sorted(self.concerned()):
                found.setdefault(worker.rpartition("/")[0], []).append(worker)
            known = self._on_nodes = (self.members, self.change, found)
        return known[2]

    def members_of(self, workers: Iterable[str]) -> list[Member]:
        """Return the members among some workers."""
        return [member for worker in workers if (member := self.members.get(worker)) is not None]

    def nodes(self) -> list[str]:
        """Return the nodes of the members, in the order of their lowest ranks; computed once for each stage."""
        if self._nodes is None or self._nodes[0] is not self.members:
            ranked = sorted(self.members.values(), key=lambda member: member.rank)
            self._nodes = (self.members, list(dict.fromkeys(member.node for member in ranked)))
        return self._nodes[1]

    def identify(self, identity: dict[str, str]) -> None:
        """Note what the task's members have agreed to be."""
        self.identity = identity

    def accepts(self, worker: str, generation: int) -> bool:
        """Return whether a failure of the worker's process of this generation is news for the task."""
        if self.ended or worker not in self.concerned() or generation <= self.covered.get(worker, -1):
            return False
        return generation == self.generation if self.change is None else generation >= self.generation

    def newest_generation(self) -> int:
        """Return the newest generation that the outstanding plan leads to, else the present one."""
        return max([self.generation, *(stage.generation for stage in self.stages())])

    def is_current(self, generation: int) -> bool:
        """Return whether checkpoints, stops and results of this generation count."""
        known = {self.generation, *(stage.generation for stage in self.stages())}
        return not self.ended and generation in known

    def stages(self) -> list[Stage]:
        """Return the stages of the outstanding plan, in order."""
        return self.change.stages if self.change is not None else []

    @property
    def gaps(self) -> ProgressGaps:
        """For how long its ranks went without progress in the present layout."""
        return self.progress.present

    def resume(self, stage: Stage, event: StateMoved) -> None:
        """Enter a stage that trains: its members are the task's, and its steps are timed anew."""
        self.previous_mean_s = self.mean_step_s() or self.previous_mean_s
        self.previous_size = len(self.members) or self.previous_size
        self.generation, self.members = stage.generation, {m.worker: m for m in stage.members}
        self.layout = stage.layout
        self.statistics.enter(self.generation, self.layout, self.members)
        self.has_trained, self.is_saved = True, False
        self.step = event.step
        setup_s = sum(event.durations_s.get(name, 0.0) for name in ("rebuild", "agree", "move"))
        self.setup_s = max(self.setup_s or 0.0, setup_s) or None
        if self.change is not None and not self.members.keys().isdisjoint(self.change.prepare):
            first_s = sum(event.durations_s.get(name, 0.0) for name in ("redistribute", "first_step"))
            self.cold_s = max(self.cold_s or 0.0, first_s)
        self.durations_s.clear()
        self.timed = 0
        self.progress.enter(stage.layout, stage.members)
        self.absent_since = {}

    def change_wishes(self, weight: float, min_workers: int) -> None:
        """Note that a user has changed the task's weight, or how many workers it needs at least."""
        self.weight, self.min_workers = weight, min_workers

    def mean_step_s(self) -> float | None:
        """Return the mean of the recent steps of this generation; None if no step was timed."""
        return sum(self.durations_s) / len(self.durations_s) if self.durations_s else None

    def deviation_step_s(self) -> float:
        """Return the standard deviation of the recent steps of this generation; 0 if no step was timed."""
        return pstdev(self.durations_s) if self.durations_s else 0.0


@dataclass(frozen=True, slots=True)
class EndedTask:
    """What stays of a task that has ended and has nothing left to do: agents may still report its processes.

    The attributes are those of ``MonitoredTask``. A task that is submitted again under the name goes on from them.
    """

    generation: int
    highest_generation: int
    recorded: dict[str, int]
    identity: dict[str, str] = field(default_factory=dict)
    copies_until: datetime | None = None
