"""What the cluster monitor knows: the fold of the log, and beside it the telemetry that stays out of the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import pstdev

from services.detector.stalls import STOPPED
from shared.events import (
    ErrorDetected,
    Event,
    NodeJoined,
    PlanDecided,
    StateMoved,
    TaskCheckpointed,
    TaskFailed,
    TaskFinished,
    TaskProgressed,
    TaskStopped,
    TaskSubmitted,
)
from shared.plans import Layout, Member, Stage, TaskChange
from shared.severities import ErrorKind
from shared.signals import Heartbeat, RankRaised, WorkerStatus

RECENT_STEPS = 32
"""Step durations kept for the mean and the median: enough to be steady, few enough to follow a real change."""


@dataclass(slots=True)
class NodeView:
    """A node. ``joined``: its newest join event; ``lost``: the error event that declared it lost, if one did.

    ``heard_at`` and ``heartbeat`` are telemetry: the newest heartbeat and when the monitor received it;
    ``excused_until``: until when its silence is explained by a bus that was away. ``stopped``:
    pid -> since when every heartbeat has shown that process stopped (kernel state T).
    """

    name: str
    incarnation: str
    joined: str
    lost: str | None = None
    heard_at: datetime | None = None
    excused_until: datetime | None = None
    heartbeat: Heartbeat | None = None
    cleaned_at: datetime | None = None
    stopped: dict[int, datetime] = field(default_factory=dict)

    def hear(self, heartbeat: Heartbeat, now: datetime) -> None:
        """Take in a heartbeat."""
        self.heard_at = now if self.heard_at is None else max(now, self.heard_at)
        self.heartbeat = heartbeat
        stopped = [w.pid for w in heartbeat.workers if w.pid is not None and w.process_state in STOPPED]
        self.stopped = {pid: self.stopped.get(pid, now) for pid in stopped}

    @property
    def silent_since(self) -> datetime | None:
        """From when on its silence counts; None before it was heard."""
        if self.heard_at is None or self.excused_until is None:
            return self.heard_at
        return max(self.heard_at, self.excused_until)

    def stopped_s(self, pid: int | None, now: datetime) -> float:
        """Return for how long a process has been seen stopped; 0 if it was not.

        The agent tells at once of one that goes on, so until its next heartbeat is overdue the process is taken for
        stopped still.
        """
        since = self.stopped.get(pid) if pid is not None else None
        if since is None or self.heard_at is None or self.heartbeat is None:
            return 0.0
        until = min(now, self.heard_at + timedelta(seconds=self.heartbeat.interval_s))
        return (until - since).total_seconds()


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a task: ``key`` names its kind, error and step."""

    key: str
    at: datetime
    generation: int


@dataclass(slots=True)
class Suspicion:
    """Ranks whose collectives broke, without a cause so far."""

    generation: int
    at: datetime
    signals: list[RankRaised]


@dataclass(slots=True)
class TaskView:
    """A task.

    ``generation`` and ``members``: of the newest stage known to have resumed. ``highest``: the highest generation
    that any plan named so far: agents may have seen it, and refuse what is older. ``change``: what the newest plan
    still has to do, with that plan's id in ``plan``. ``covered``: worker -> generation up to which what happens to it
    belongs to an incident that is known. ``unanswered``: error events of the task that no plan has answered yet.
    ``broken``: that the outstanding plan could not be carried out, until an error event says so. ``told``: event id ->
    generation of the checkpoints, stops and results that the log holds.
    """

    name: str
    max_restarts: int
    generation: int = 0
    highest: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    layout: Layout | None = None
    plan: str | None = None
    change: TaskChange | None = None
    ended: bool = False
    step: int = 0
    covered: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unanswered: set[str] = field(default_factory=set)
    broken: StateMoved | None = None
    suspicion: Suspicion | None = None
    told: dict[str, int] = field(default_factory=dict)
    setup_s: float | None = None
    """The longest that joining a generation has taken its ranks so far."""
    # Telemetry and its summaries
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    timed: int = 0
    previous_mean_s: float | None = None
    previous_size: int = 0
    progressed_at: datetime | None = None
    progressed_generation: int = -1
    progressed_step: int = -1
    of_change: tuple[TaskChange, frozenset[str]] | None = field(default=None, compare=False, repr=False)
    """The plan's change for which ``concerned`` was put together last, and the workers."""

    def concerned(self) -> Set[str]:
        """Return the workers whose processes matter to the task at this moment.

        Asked for each worker of a large task, so it is put together once for a plan.
        """
        if self.change is None:
            return self.members.keys()
        change = self.change
        if self.of_change is None or self.of_change[0] is not change:
            workers = {*change.survivors, *change.prepare, *change.release}
            workers |= {m.worker for stage in self.stages() for m in stage.members}
            self.of_change = change, frozenset(workers)
        return self.of_change[1]

    def accepts(self, worker: str, generation: int) -> bool:
        """Whether what happens to the worker's process of that generation is news for this task."""
        if self.ended or worker not in self.concerned() or generation <= self.covered.get(worker, -1):
            return False
        return generation == self.generation if self.change is None else generation >= self.generation

    def newest_generation(self) -> int:
        """Return the newest generation that the outstanding plan leads to, else the present one."""
        return max([self.generation, *(stage.generation for stage in self.stages())])

    def current(self, generation: int) -> bool:
        """Whether effects (checkpoints, results) of that generation count."""
        known = {self.generation, *(stage.generation for stage in self.stages())}
        return not self.ended and generation in known

    def stages(self) -> list[Stage]:
        """Return what the outstanding plan leads through, in order."""
        return self.change.stages if self.change is not None else []

    def mean_step_s(self) -> float | None:
        """Return the mean of the recent steps of this generation."""
        return sum(self.durations_s) / len(self.durations_s) if self.durations_s else None

    def deviation_step_s(self) -> float:
        """Return the standard deviation of the recent steps of this generation; 0 while none is known."""
        return pstdev(self.durations_s) if self.durations_s else 0.0


@dataclass(frozen=True, slots=True)
class PlanNote:
    """What the detector remembers of a plan: the event it answers."""

    cause: str


@dataclass(slots=True)
class View:
    """Everything the monitor decides from."""

    nodes: dict[str, NodeView] = field(default_factory=dict)
    tasks: dict[str, TaskView] = field(default_factory=dict)
    plans: dict[str, PlanNote] = field(default_factory=dict)
    errors: dict[str, ErrorDetected] = field(default_factory=dict)

    def status(self, worker: str) -> WorkerStatus | None:
        """Return the newest status of a worker."""
        node = self.nodes.get(worker.rpartition("/")[0])
        if node is None or node.heartbeat is None:
            return None
        return next((w for w in node.heartbeat.workers if w.worker == worker), None)

    def running(self) -> Iterator[TaskView]:
        """Return the tasks that train and have no plan outstanding and no error unanswered."""
        for task in self.tasks.values():
            if not task.ended and task.members and task.change is None and not task.unanswered:
                yield task

    def moving(self) -> Iterator[TaskView]:
        """Return the tasks with a plan under way and no error unanswered."""
        for task in self.tasks.values():
            if not task.ended and task.change is not None and task.broken is None and not task.unanswered:
                yield task

    def stopped_s(self, worker: str, now: datetime) -> float:
        """Return for how long the worker's process has been seen stopped; 0 if it runs, or its node is lost."""
        node, status = self.nodes.get(worker.rpartition("/")[0]), self.status(worker)
        if node is None or node.lost is not None or status is None:
            return 0.0
        return node.stopped_s(status.pid, now)


def evolve(view: View, event: Event) -> View:
    """Fold one event into the view (in place)."""
    match event:
        case NodeJoined():
            known = view.nodes.get(event.node)
            same = known is not None and known.incarnation == event.incarnation
            view.nodes[event.node] = NodeView(
                name=event.node,
                incarnation=event.incarnation,
                joined=event.event_id,
                heard_at=known.heard_at if known is not None and same else None,
                heartbeat=known.heartbeat if known is not None and same else None,
            )
        case TaskSubmitted():
            # A name may come again once its task has ended; generations go on rising, failures start anew.
            old = view.tasks.get(event.task)
            view.tasks[event.task] = TaskView(
                name=event.task,
                max_restarts=event.spec.max_restarts,
                step=event.step,
                generation=old.generation if old is not None else 0,
                highest=old.highest if old is not None else 0,
                told=old.told if old is not None else {},
            )
        case TaskProgressed():
            task = _task(view, event.task)
            task.step = event.step
            task.progressed_at, task.progressed_step = event.occurred_at, event.step
            task.progressed_generation = event.generation
        case TaskCheckpointed():
            _task(view, event.task).told[event.event_id] = event.generation
        case TaskStopped() | TaskFinished() | TaskFailed():
            task = _task(view, event.task)
            if not isinstance(event, TaskFailed):
                task.told[event.event_id] = event.generation
            pausing = task.change is not None and task.change.action == "pause"
            # A paused task has saved its state and goes on later, when there are workers for it.
            task.ended = not (pausing and isinstance(event, TaskStopped))
            task.members, task.suspicion, task.broken = {}, None, None
            task.unanswered.clear()
        case ErrorDetected():
            _error(view, event)
        case PlanDecided():
            _plan(view, event)
        case StateMoved():
            _moved(view, event)
        case _:
            pass
    return view


def _task(view: View, name: str) -> TaskView:
    return view.tasks.setdefault(name, TaskView(name=name, max_restarts=3))


def _error(view: View, event: ErrorDetected) -> None:
    view.errors[event.event_id] = event
    if event.kind is ErrorKind.NODE_LOST and event.node is not None and event.escalates is None:
        node = view.nodes.get(event.node)
        if node is not None and node.incarnation == event.evidence.get("incarnation", node.incarnation):
            node.lost = event.event_id
        for name, part in event.evidence.get("tasks", {}).items():
            task = _task(view, name)
            task.unanswered.add(event.event_id)
            task.suspicion = task.broken = None
            for worker in part["workers"]:
                task.covered[worker] = max(task.covered.get(worker, -1), part["generation"])
    if event.task is None:
        return
    task = _task(view, event.task)
    task.unanswered.add(event.event_id)
    task.suspicion = task.broken = None
    generation = event.generation if event.generation is not None else task.generation
    if event.worker is not None:
        task.covered[event.worker] = max(task.covered.get(event.worker, -1), generation)
    if (key := event.evidence.get("failure")) is not None:
        task.failures.append(Failure(key, event.detected_at, generation))


def _plan(view: View, event: PlanDecided) -> None:
    view.plans[event.plan] = PlanNote(cause=event.cause)
    for task in view.tasks.values():
        task.unanswered.discard(event.cause)
    for change in event.changes:
        task = _task(view, change.task)
        task.plan, task.suspicion, task.broken = event.plan, None, None
        task.highest = max([task.highest, change.from_generation, *(stage.generation for stage in change.stages)])
        idle = change.action == "none" and change.interrupted is None and not (change.hold or change.release)
        task.change = None if idle else change
        # What older generations still say does not count any more, so it need not be known again.
        task.told = {told: of for told, of in task.told.items() if of >= task.generation}
        for worker in change.failed:
            task.covered[worker] = max(task.covered.get(worker, -1), change.from_generation)


def _moved(view: View, event: StateMoved) -> None:
    task = _task(view, event.task)
    if task.plan != event.plan or task.change is None:
        return
    stage = next((s for s in task.change.stages if s.generation == event.generation), None)
    if event.phase in ("resumed", "restored") and stage is not None:
        task.previous_mean_s = task.mean_step_s() or task.previous_mean_s
        task.previous_size = len(task.members) or task.previous_size
        task.generation, task.members = stage.generation, {m.worker: m for m in stage.members}
        task.layout = stage.layout
        task.step = event.step
        setup_s = sum(event.durations_s.get(name, 0.0) for name in ("rebuild", "agree", "move"))
        task.setup_s = max(task.setup_s or 0.0, setup_s) or None
        task.durations_s.clear()
        task.timed = 0
    if event.phase == "failed":
        task.broken = event
    if event.complete:
        if event.phase == "ended":
            task.members = {}
        task.change = None
