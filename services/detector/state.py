"""The detector's state: the fold of the log (``evolve.py``), and beside it the telemetry that stays out of the log.

The state is changed in place: a large cluster sends thousands of heartbeats a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import pstdev

from pydantic import InstanceOf

from services.detector.anomalies import OpenAnomaly
from services.detector.arrivals import Arrivals
from services.detector.cause_history import CauseHistory
from services.detector.known_errors import FailureHistory, KnownError
from services.detector.link_state import Inquiry, Isolation, ProbeResult
from services.detector.observation_state import IncidentWatch
from services.detector.pairs import Pair
from services.detector.progress_gaps import ProgressGaps
from services.detector.regressions import TaskRates
from services.detector.return_state import SelfTestState
from services.detector.slow_links import RoundTrips
from services.detector.stalls import STOPPED
from services.detector.step_statistics import StepStatistics
from shared.admission import Hello
from shared.events import NodeDraining, StateMoved
from shared.plans import Layout, Member, Stage, TaskChange
from shared.signals import DeviceFailed, Heartbeat, RankRaised, WorkerStatus
from shared.stacks import RankReport
from shared.state_codec import PairMap, Unlogged
from shared.tasks import DEFAULT_MAX_RESTARTS

MTBF_NODE_S = 20 * 86_400.0
"""The default of the setting, for a log without ``cluster.configured`` (``shared.settings`` has the reason)."""

RECENT_STEPS = 32
"""Step durations kept for the mean and the median: enough to be steady, few enough to follow a real change."""


@dataclass(slots=True)
class MonitoredNode:
    """A node.

    Attributes:
        name: the node's name.
        incarnation: of its agent.
        joined: id of its newest join event.
        supervisor: id of the process that starts its agents again; empty if there is none.
        hardware: the kind of its workers.
        past: the incarnations before it.
        lost: id of the error event that declared it lost; None while it counts as alive.
        draining: the newest request to empty it; None if there is none, or it was returned.
        planned: whether a plan has answered that request.
        drained: whether the log has that it is empty.
        left: whether its agent has left in order. Heartbeats that still come from that agent mean nothing.
        heard_at: when the detector received its newest heartbeat.
        excused_until: until when a bus that was away explains its silence.
        heartbeat: its newest heartbeat.
        cleaned_at: when it was last asked to end the ranks that its absence left behind, or that no plan names.
        leftover_since: workers whose process no plan names, and since when (``leftovers.py``).
        stopped: pid -> the time since which every heartbeat has shown the process stopped (kernel state T).
        reached_at: when the newest question was put that a witness answered with having reached its agent.
        witnesses: who was asked to probe it -> when last.
        asked_at: when witnesses were asked about it last because of its silence.
        asked_since: when a witness was first asked about it in its present silence.
        unreachable_since: when it was heard last, while it is silent and not lost (``silence.py``).
        adopted_until: end of the time in which a node that was unreachable sends the signals that have waited.
        arrivals: how late its heartbeats have come.
    """

    name: str
    incarnation: str
    joined: str
    supervisor: str = ""
    hardware: str = "cpu"
    past: frozenset[str] = frozenset()
    lost: str | None = None
    left: bool = False
    draining: NodeDraining | None = None
    planned: bool = False
    drained: bool = False
    heard_at: datetime | None = None
    excused_until: datetime | None = None
    heartbeat: Heartbeat | None = None
    cleaned_at: datetime | None = None
    leftover_since: dict[str, datetime] = field(default_factory=dict)
    stopped: dict[int, datetime] = field(default_factory=dict)
    reached_at: datetime | None = None
    witnesses: dict[str, datetime] = field(default_factory=dict)
    asked_at: datetime | None = None
    asked_since: datetime | None = None
    unreachable_since: datetime | None = None
    adopted_until: datetime | None = None
    arrivals: Unlogged[InstanceOf[Arrivals]] = field(default_factory=Arrivals, compare=False, repr=False)

    def has_newer(self, heartbeat: Heartbeat) -> bool:
        """Return whether a later heartbeat of the same agent has been received, or this very one."""
        newest = self.heartbeat
        same = newest is not None and newest.incarnation == heartbeat.incarnation
        return same and newest is not None and newest.sequence >= heartbeat.sequence

    def receive(self, heartbeat: Heartbeat, now: datetime) -> None:
        """Take a heartbeat that was received at ``now``.

        How late it is tells of the node, unless the bus or the node's link was away, or another agent has sent the one
        before.
        """
        known, excused = self.heartbeat, (self.excused_until, self.adopted_until)
        if known is not None and known.incarnation == heartbeat.incarnation and self.heard_at is not None:
            if all(until is None or until < self.heard_at for until in excused):
                self.arrivals.note((now - self.heard_at).total_seconds(), known.interval_s)
        self.heard_at = now if self.heard_at is None else max(now, self.heard_at)
        self.heartbeat = heartbeat
        self.asked_since = None
        stopped = [w.pid for w in heartbeat.workers if w.pid is not None and w.process_state in STOPPED]
        self.stopped = {pid: self.stopped.get(pid, now) for pid in stopped}

    @property
    def present(self) -> bool:
        """Whether the node takes part in the cluster: neither lost nor left."""
        return self.lost is None and not self.left

    @property
    def silent_since(self) -> datetime | None:
        """The time from which its silence counts; None before its first heartbeat, unless it is excused."""
        return max((at for at in (self.heard_at, self.excused_until) if at is not None), default=None)

    def stopped_s(self, pid: int | None, now: datetime) -> float:
        """Return for how many seconds a process has been seen stopped; 0 if it was not.

        The agent reports at once when a stopped process goes on. So the process counts as stopped until the node's
        next heartbeat is overdue.
        """
        since = self.stopped.get(pid) if pid is not None else None
        if since is None or self.heard_at is None or self.heartbeat is None:
            return 0.0
        until = min(now, self.heard_at + timedelta(seconds=self.heartbeat.interval_s))
        return (until - since).total_seconds()


@dataclass(frozen=True, slots=True)
class Admitted:
    """An agent that was admitted under a name and has not sent a heartbeat yet. ``at``: when it was admitted."""

    hello: Hello
    at: datetime


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
        generation: of its ranks.
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
        generation: of the newest stage known to have resumed.
        highest_generation: the highest that any plan has named. Agents may have seen it, and refuse older commands.
        members: worker -> member of that stage.
        layout: of that stage.
        has_trained: whether any stage has resumed since the task was submitted.
        plan: id of the newest plan that changes the task.
        cause: the error that this plan answers; None if it answers another kind of event.
        change: the part of that plan that is still to be done; None if nothing is.
        ended: the task has finished, stopped or failed.
        step: updates applied.
        covered: worker -> the generation up to which a failure of the worker belongs to a known incident.
        failures: how the task has failed so far.
        unanswered: ids of the events (errors, nodes that left) that concern the task and no plan has answered yet.
        failed_transition: the event that the outstanding plan could not be carried out, until an error event follows.
        suspicion: broken collectives without a known cause.
        recorded: event id -> generation of the checkpoints, stops, results and errors that the log has and that may be
            found again.
        checkpoint_failures: kinds of the failures of checkpoints that the log has since the last one that was written.
        setup_s: the longest time that its ranks have taken to join a generation, seconds.
        durations_s: durations of the recent steps of this generation, seconds.
        timed: how many steps of this generation were timed.
        gaps: for how long its ranks went without progress in this generation.
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
        anomalies: those that last, by key (``anomalies.py``).
        rates: step times of its layouts (``regressions.py``).
        statistics: of its ranks' steps.
    """

    name: str
    max_restarts: int
    weight: float = 1.0
    generation: int = 0
    highest_generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    layout: Layout | None = None
    has_trained: bool = False
    plan: str | None = None
    cause: KnownError | None = None
    change: TaskChange | None = None
    ended: bool = False
    step: int = 0
    covered: dict[str, int] = field(default_factory=dict)
    failures: FailureHistory = field(default_factory=FailureHistory)
    unanswered: set[str] = field(default_factory=set)
    failed_transition: StateMoved | None = None
    suspicion: Suspicion | None = None
    recorded: dict[str, int] = field(default_factory=dict)
    checkpoint_failures: set[str] = field(default_factory=set)
    setup_s: float | None = None
    # Telemetry and its summaries
    durations_s: Unlogged[deque[float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    timed: int = 0
    gaps: Unlogged[InstanceOf[ProgressGaps]] = field(default_factory=ProgressGaps, compare=False, repr=False)
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
    """The plan's change that ``concerned`` was computed for last, and the workers."""

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
        return [] if self.ended else sorted(w for w in self.concerned() if w.startswith(f"{node}/"))

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


@dataclass(slots=True)
class DetectorState:
    """Everything that the detector decides from.

    Attributes:
        nodes: by name.
        tasks: by name, without those in ``ended``.
        ended: tasks that have ended, and of which no plan and no answer is outstanding, by name.
        unanswered: errors that no plan has answered yet, by id, in the order of the log.
        joins: ids of the join events. Each incarnation of an agent joins once, and once after each loss.
        admitted: admitted agents that have not joined yet, by node. Not in the log.
        isolated: nodes that are left out because of a broken link, or until an operator returns them.
        condemned: nodes that another error of SEV1 isolated -> its id. They are tested before they return.
        withheld: those of them that a fault of a device isolated.
        early_devices: reports on devices by agents that have not joined yet, by node. Not in the log.
        causes: what is remembered of the causes of errors.
        mtbf_node_s: mean time between failures of a node, of the newest ``cluster.configured``, seconds.
        breaks: when each pair of nodes was found broken, as long as it is remembered.
        slowed: worker -> slowdown, of those that are slower than their peers.
        round_trips: of pairs of nodes. Not in the log.
        probes: (witness, node) -> the answer to the newest question. Not in the log.
        self_tests: the self-tests of isolated nodes, by node. Not in the log.
        watches: incidents whose observations are collected, by id. Not in the log.
        cut_off_since: since when no node is heard, and none is known to be lost. Not in the log.
        standstills: by task, of those that seem to stand still. Not in the log.
    """

    nodes: dict[str, MonitoredNode] = field(default_factory=dict)
    tasks: dict[str, MonitoredTask] = field(default_factory=dict)
    ended: dict[str, EndedTask] = field(default_factory=dict)
    unanswered: dict[str, KnownError] = field(default_factory=dict)
    joins: set[str] = field(default_factory=set)
    admitted: dict[str, Admitted] = field(default_factory=dict)
    isolated: dict[str, Isolation] = field(default_factory=dict)
    condemned: dict[str, str] = field(default_factory=dict)
    withheld: dict[str, str] = field(default_factory=dict)
    early_devices: Unlogged[dict[str, list[DeviceFailed]]] = field(default_factory=dict)
    causes: CauseHistory = field(default_factory=CauseHistory)
    mtbf_node_s: float = MTBF_NODE_S
    breaks: PairMap[Pair, list[datetime]] = field(default_factory=dict)
    probes: PairMap[tuple[str, str], ProbeResult] = field(default_factory=dict)
    self_tests: Unlogged[dict[str, SelfTestState]] = field(default_factory=dict, compare=False)
    watches: Unlogged[dict[str, IncidentWatch]] = field(default_factory=dict, compare=False)
    cut_off_since: datetime | None = None
    standstills: Unlogged[dict[str, Standstill]] = field(default_factory=dict)
    slowed: dict[str, float] = field(default_factory=dict)
    round_trips: Unlogged[RoundTrips] = field(default_factory=RoundTrips, compare=False, repr=False)

    def highest_generation(self, name: str) -> int:
        """Return the highest generation of a task that any plan has named; 0 if the log does not have the task."""
        task = self.tasks.get(name) or self.ended.get(name)
        return task.highest_generation if task is not None else 0

    def answered(self, cause: str) -> KnownError | None:
        """Return the error that a plan answers, which is unanswered no more; None if its cause is no error.

        The planner answers in the order of the log: errors before this one are not answered any more either.
        """
        error = self.unanswered.get(cause)
        while error is not None and cause in self.unanswered:
            del self.unanswered[next(iter(self.unanswered))]
        return error

    def settle(self, name: str) -> None:
        """Keep little of a task that has ended and has nothing left to do."""
        task = self.tasks.get(name)
        if task is not None and task.ended and task.change is None and not task.unanswered:
            del self.tasks[name]
            self.causes.forget_task(name)
            self.ended[name] = EndedTask(task.generation, task.highest_generation, task.recorded)

    def recall(self, name: str) -> MonitoredTask | None:
        """Return a task, again as one of ``tasks`` if it had ended; None if the log does not have it."""
        ended = self.ended.pop(name, None)
        if ended is not None:
            self.tasks[name] = MonitoredTask(
                name=name,
                max_restarts=DEFAULT_MAX_RESTARTS,
                generation=ended.generation,
                highest_generation=ended.highest_generation,
                recorded=ended.recorded,
                ended=True,
            )
        return self.tasks.get(name)

    def status(self, worker: str) -> WorkerStatus | None:
        """Return the newest status of a worker."""
        node = self.nodes.get(worker.rpartition("/")[0])
        if node is None or node.heartbeat is None:
            return None
        return next((w for w in node.heartbeat.workers if w.worker == worker), None)

    def running(self) -> Iterator[MonitoredTask]:
        """Yield the tasks that train and have neither an outstanding plan nor an unanswered error."""
        for task in self.tasks.values():
            if not task.ended and task.members and task.change is None and not task.unanswered:
                yield task

    def moving(self) -> Iterator[MonitoredTask]:
        """Yield the tasks that have a plan in progress and no unanswered error."""
        for task in self.tasks.values():
            if not task.ended and task.change is not None and task.failed_transition is None and not task.unanswered:
                yield task

    def stopped_s(self, worker: str, now: datetime) -> float:
        """Return for how many seconds the worker's process has been seen stopped; 0 if its node is lost or left."""
        node, status = self.nodes.get(worker.rpartition("/")[0]), self.status(worker)
        if node is None or not node.present or status is None:
            return 0.0
        return node.stopped_s(status.pid, now)
