"""The state of the transition service, and the inputs and effects of its core.

The state is the fold of the log, of agents' replies and of timers (``evolve``). A ``Part`` is one task's part of one
plan; a task has at most one part, that of its newest plan. Values here are immutable, but for the collections that grow
with the cluster (commands and replies of a phase, workers that are occupied or ready, nodes): each of thousands of
replies would copy them. They are changed in place, and nobody keeps an older state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from shared.events.codes import FailureCode
from shared.events.plans import Stage, TaskChange
from shared.messages.commands import Command, Reply
from shared.service.core import Append, Logged, Started
from shared.tasks.specification import TaskSpec

SIGNALLED = frozenset({FailureCode.PROCESS_EXITED, FailureCode.RANK_RAISED, FailureCode.NODE_LOST})
"""Codes of failures that the detector learns of by itself, from an agent's signal or the lack of heartbeats. A plan
that answers the fault is likely to follow; a state-moved event for the same fault would count it twice."""


class Phase(StrEnum):
    """The phases of a part. ``phases.AFTER`` says which phases each one waits for."""

    HOLD = "hold"
    FREE = "free"
    """Release the failed workers."""
    PREPARE = "prepare"
    STORE_INTERRUPTED = "store-interrupted"
    CONFIGURE_INTERRUPTED = "configure-interrupted"
    DRAIN = "drain"
    STOP = "stop"
    RELEASE = "release"
    STORE_TARGET = "store-target"
    CONFIGURE_TARGET = "configure-target"


class Outcome(StrEnum):
    """The status of a part. A part leaves ``ACTIVE`` once."""

    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    """A newer plan took the task over, an agent has seen a newer generation, or the task ended by itself."""


@dataclass(frozen=True, slots=True)
class TransitionLimits:
    """Time limits in seconds, from the settings; the defaults are those of ``settings.model`` but for ``grace_s``.

    ``command_s``: for a reply that waits for no training step. ``resume_s``: for a reply that waits for one.
    ``grace_s``: how long a failure that the detector learns of by itself waits for the plan that answers it, and how
    long the end of a pause waits for the event that says where the state was saved. That wait is ``resume_s`` if all
    have answered that they have saved it.
    """

    command_s: float = 60.0
    resume_s: float = 300.0
    grace_s: float = 2.0

    @property
    def wait_s(self) -> float:
        """How long a part waits for another task to release a worker: as long as that task's phases may take.

        These are two replies that wait for a step (interrupted stage; drain or stop) and three that do not (hold,
        store, release).
        """
        return 2 * self.resume_s + 3 * self.command_s


# ---- inputs


@dataclass(frozen=True, slots=True)
class Replied:
    """An agent's reply to a command; ``reply`` is None if none came within the time-out."""

    command_id: str
    reply: Reply | None
    at: datetime


class TimerName(StrEnum):
    """The purpose of a timer: see ``TransitionLimits``."""

    GRACE = "grace"
    SAVE = "save"
    WAIT = "wait"
    BACK_OFF = "back-off"
    """Time until ``not_before`` of the change: no process is started before, or nothing retried. A user may end it
    sooner."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A ``Timer`` has run out."""

    plan: str
    task: str
    name: TimerName
    at: datetime


Input = Logged | Started | Replied | TimerFired


# ---- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to the agent of ``node``. ``workers``: the workers to blame if the command fails."""

    node: str
    command: Command
    timeout_s: float
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Do not send the command again; its reply no longer matters."""

    command_id: str


@dataclass(frozen=True, slots=True)
class Timer:
    """Feed ``TimerFired`` back after ``after_s``."""

    plan: str
    task: str
    name: TimerName
    after_s: float


Effect = Send | Cancel | Append | Timer


# ---- state


@dataclass(slots=True)
class PhaseRun:
    """A phase that has begun; it is changed in place.

    ``outstanding``: its unanswered commands by id. ``asked``: the number of their workers. ``silent``: workers whose
    command timed out.
    """

    started_at: datetime
    outstanding: dict[str, Send] = field(default_factory=dict)
    asked: int = 0
    replies: list[Reply] = field(default_factory=list)
    silent: tuple[str, ...] = ()
    ended_at: datetime | None = None

    def seconds(self, now: datetime) -> float:
        """Return the wall time of the phase until its end, or until ``now`` if it has not ended."""
        return max(0.0, ((self.ended_at or now) - self.started_at).total_seconds())

    def send(self, sends: Iterable[Send]) -> None:
        """Add commands to those that are unanswered."""
        for send in sends:
            self.outstanding[send.command.command_id] = send
            self.asked += len(send.workers)

    def take(self, command_id: str) -> Send:
        """Take an unanswered command away, and return it."""
        send = self.outstanding.pop(command_id)
        self.asked -= len(send.workers)
        return send


@dataclass(frozen=True, slots=True)
class Failure:
    """A reason why a part cannot go on. ``workers``: the workers to blame; ``detail``: text for people."""

    phase: Phase
    code: FailureCode
    detail: str
    workers: tuple[str, ...]

    @property
    def signalled(self) -> bool:
        """Whether the detector learns of the cause by itself."""
        return self.code in SIGNALLED


@dataclass(frozen=True, slots=True)
class Part:
    """One task's part of one plan.

    ``generation``: the generation of commands that belong to no stage. ``done``: phases that have ended. ``ready``:
    workers of ``change.prepare`` whose process is up. ``timers``, ``fired``: timers that were started, and those of
    them that have run out. ``moved``: phases of this part's state-moved events. ``saved``: whether the log says where
    the task's state was saved.
    """

    plan: str
    incident: str | None
    change: TaskChange
    generation: int
    outcome: Outcome = Outcome.ACTIVE
    runs: Mapping[Phase, PhaseRun] = field(default_factory=dict)
    done: frozenset[Phase] = frozenset()
    ready: set[str] = field(default_factory=set)
    failures: tuple[Failure, ...] = ()
    timers: frozenset[TimerName] = frozenset()
    fired: frozenset[TimerName] = frozenset()
    moved: frozenset[str] = frozenset()
    saved: bool = False

    @property
    def task(self) -> str:
        """The task's name."""
        return self.change.task

    @property
    def active(self) -> bool:
        """Whether something is left to do."""
        return self.outcome is Outcome.ACTIVE

    def outstanding(self) -> dict[str, Send]:
        """Return all unanswered commands by id."""
        return {cid: send for run in self.runs.values() for cid, send in run.outstanding.items()}

    def with_run(self, phase: Phase, run: PhaseRun) -> Part:
        """Return the part with the phase's run replaced."""
        return replace(self, runs={**self.runs, phase: run})

    def with_failure(self, failure: Failure) -> Part:
        """Return the part with one more failure."""
        return replace(self, failures=(*self.failures, failure))

    def ended(self, outcome: Outcome) -> Part:
        """Return the part with this outcome and no outstanding commands."""
        runs = {phase: replace(run, outstanding={}, asked=0) for phase, run in self.runs.items()}
        return replace(self, outcome=outcome, runs=runs)


RECENTLY_ENDED = 64
"""Tasks that have ended and have nothing left to do, which are kept nevertheless. A plan whose cause came before the
end may come after it, while the planner answers what came before; far fewer tasks end in that time."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task.

    Attributes:
        spec: its specification; None: the log has none.
        step: the newest known step.
        resumes: whether it was asked to go on when it was last submitted.
        generation: the newest known generation.
        ended: whether it has ended, or was paused, since it was submitted: its processes exit by themselves.
        paused: whether the newest of these ends was a pause, so that the task may go on.
        unfinished: whether it has ended otherwise than with its result, so that it may be resumed.
        occupied: workers that may have a process of the task.
        leaving: workers whose process a plan has ended or is ending, without a successor so far.
        may_lose: whether a user wants it to stop also if that loses steps.
        identity: what its members have agreed to be since it was submitted; empty: not known.
        part: its part of its newest plan; None before the first.
        stages: those in which its ranks may be: the one that was formed last, and those that superseded plans may have
            begun since; none: it is not known.
    """

    spec: TaskSpec | None = None
    step: int = 0
    resumes: bool = False
    generation: int = 0
    ended: bool = False
    paused: bool = False
    unfinished: bool = False
    occupied: set[str] = field(default_factory=set)
    leaving: frozenset[str] = frozenset()
    may_lose: bool = False
    part: Part | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether the task has ended, for good or in a pause, and has nothing left to do."""
        return self.ended and (self.part is None or not self.part.active)


NO_TASK = Task()
"""What is known of a task that the log does not have, or that ended long ago."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything that decisions use.

    ``tasks``: by name, without those that ended long ago (``RECENTLY_ENDED``): what an input costs does not grow with
    the number of tasks that the log has ever had. ``incarnations``: node -> incarnation of its agent. ``workers``: node
    -> its workers. ``lost``: nodes that are sent nothing; ``away``: those of them whose agent is lost or has left.
    ``cancelled``: commands whose replies no longer matter, until ``decide`` turns them into effects.
    """

    limits: TransitionLimits = TransitionLimits()
    tasks: Mapping[str, Task] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)
    workers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    cancelled: tuple[str, ...] = ()

    def task(self, name: str) -> Task:
        """Return what is known of a task."""
        return self.tasks.get(name, NO_TASK)

    def parts(self) -> Iterator[Part]:
        """Yield the parts of all tasks."""
        return (task.part for task in self.tasks.values() if task.part is not None)

    def with_task(self, name: str, task: Task) -> State:
        """Return the state with the task added or replaced."""
        return replace(self, tasks={**self.tasks, name: task})

    def with_part(self, part: Part) -> State:
        """Return the state with the task's part replaced; commands that are no longer outstanding are cancelled."""
        task = self.task(part.task)
        before = task.part
        gone: tuple[str, ...] = ()
        if before is not None and (before.plan != part.plan or not part.active):
            kept = part.outstanding()
            gone = tuple(cid for cid in before.outstanding() if cid not in kept)
        tasks = {**self.tasks, part.task: replace(task, part=part)}
        return replace(self, tasks=tasks, cancelled=self.cancelled + gone)

    def with_occupied(self, name: str, workers: Iterable[str]) -> State:
        """Return the state in which the task occupies exactly these workers."""
        return self.with_task(name, replace(self.task(name), occupied=set(workers)))

    def with_leaving(self, name: str, *, add: Iterable[str] = (), drop: Iterable[str] = ()) -> State:
        """Return the state with workers added to, and dropped from, those that the task is leaving."""
        task = self.task(name)
        return self.with_task(name, replace(task, leaving=(task.leaving | frozenset(add)) - frozenset(drop)))

    def with_step(self, name: str, step: int) -> State:
        """Return the state in which the task, if it is known, has reached ``step`` at least."""
        task = self.tasks.get(name)
        return self if task is None or task.step >= step else self.with_task(name, replace(task, step=step))

    def with_ended(self, name: str, *, paused: bool = False, unfinished: bool = False) -> State:
        """Return the state in which a task has ended, without those after which ``RECENTLY_ENDED`` others ended."""
        tasks = dict(self.tasks)
        if (task := tasks.pop(name, None)) is None:
            return self
        tasks[name] = replace(task, ended=True, paused=paused, unfinished=unfinished)  # behind those that ended before
        settled = [each for each, one in tasks.items() if one.settled and not one.paused]
        for each in settled[: max(0, len(settled) - RECENTLY_ENDED)]:
            del tasks[each]
        return replace(self, tasks=tasks)

    def alive(self, workers: Iterable[str]) -> frozenset[str]:
        """Return those of the workers whose node is not lost."""
        if not self.lost:
            return frozenset(workers)
        return frozenset(worker for worker in workers if node_of(worker) not in self.lost)

    def occupied_by_others(self, name: str, worker: str) -> bool:
        """Whether another task may still have a process on the worker.

        A task that has ended and has nothing left to do does not count: its processes exit by themselves.
        """
        return any(worker in task.occupied and not task.settled for other, task in self.tasks.items() if other != name)


def node_of(worker: str) -> str:
    """Return the node in a worker's id, ``<node>/<slot>``."""
    return worker.rpartition("/")[0]
