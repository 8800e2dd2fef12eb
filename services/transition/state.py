"""The state of the transition service, and the inputs and effects of its core.

The state is the fold of the log, of agents' replies and of timers (``evolve``). A ``Part`` is one task's part of one
plan; a task has at most one part, that of its newest plan. All values here are immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from shared.codes import FailureCode
from shared.commands import Command, Reply
from shared.events import Event, Recorded
from shared.plans import TaskChange
from shared.tasks import TaskSpec

SIGNALLED = frozenset({FailureCode.PROCESS_EXITED, FailureCode.RANK_RAISED, FailureCode.NODE_LOST})
"""Codes of failures that the detector learns of by itself, from an agent's signal or the lack of heartbeats. A plan
that answers the fault is likely to follow; a state-moved event for the same fault would count it twice."""


class Phase(StrEnum):
    """The phases of a part. ``phases.AFTER`` says which phases each one waits for."""

    HOLD = "hold"
    FREE = "free"
    """Failed workers are released."""
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
    """Time limits in seconds, from the settings; the defaults are those of ``shared.settings`` but for ``grace_s``.

    ``command_s``: for a reply that waits for no training step. ``resume_s``: for a reply that waits for one.
    ``grace_s``: how long a failure that the detector learns of by itself waits for the plan that answers it, and how
    long the end of a pause waits for the event that says where the state was saved.
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
class Logged:
    """A record of the log."""

    record: Recorded


@dataclass(frozen=True, slots=True)
class Replied:
    """An agent's reply to a command; ``reply`` is None if none came within the time-out."""

    command_id: str
    reply: Reply | None
    at: datetime


class TimerName(StrEnum):
    """The purpose of a timer: see ``TransitionLimits``; ``GRACE`` and ``SAVE`` run for ``grace_s``."""

    GRACE = "grace"
    SAVE = "save"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A ``Timer`` has run out."""

    plan: str
    task: str
    name: TimerName
    at: datetime


Input = Logged | Replied | TimerFired


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
class Append:
    """Append the event to the log."""

    event: Event


@dataclass(frozen=True, slots=True)
class Timer:
    """Feed ``TimerFired`` back after ``after_s``."""

    plan: str
    task: str
    name: TimerName
    after_s: float


Effect = Send | Cancel | Append | Timer


# ---- state


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """A phase that has begun.

    ``outstanding``: its unanswered commands by id. ``silent``: workers whose command timed out.
    """

    started_at: datetime
    outstanding: Mapping[str, Send] = field(default_factory=dict)
    replies: tuple[Reply, ...] = ()
    silent: tuple[str, ...] = ()
    ended_at: datetime | None = None

    def seconds(self, now: datetime) -> float:
        """Return the wall time of the phase until its end, or until ``now`` if it has not ended."""
        return max(0.0, ((self.ended_at or now) - self.started_at).total_seconds())

    def without(self, command_ids: Iterable[str]) -> PhaseRun:
        """Return the run without these outstanding commands."""
        gone = frozenset(command_ids)
        return replace(self, outstanding={cid: send for cid, send in self.outstanding.items() if cid not in gone})


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
    ready: frozenset[str] = frozenset()
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
        runs = {phase: replace(run, outstanding={}) for phase, run in self.runs.items()}
        return replace(self, outcome=outcome, runs=runs)


@dataclass(frozen=True, slots=True)
class State:
    """Everything that decisions use.

    ``specs``, ``steps``, ``generations``: a task's specification, newest known step and newest generation. ``ended``:
    tasks that have ended. ``incarnations``: node -> incarnation of its agent. ``lost``: nodes that are sent nothing;
    ``away``: those of them whose agent is lost or has left. ``occupied``: task -> workers that may have a process of
    the task. ``leaving``: task -> workers whose process a plan has ended or is ending, without a successor so far.
    ``may_lose``: tasks that a user wants to stop also if that loses steps. ``parts``: task -> part. ``cancelled``:
    commands whose replies no longer matter, until ``decide`` turns them into effects.
    """

    limits: TransitionLimits = TransitionLimits()
    specs: Mapping[str, TaskSpec] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    generations: Mapping[str, int] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
    incarnations: Mapping[str, str] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    occupied: Mapping[str, frozenset[str]] = field(default_factory=dict)
    leaving: Mapping[str, frozenset[str]] = field(default_factory=dict)
    may_lose: frozenset[str] = frozenset()
    parts: Mapping[str, Part] = field(default_factory=dict)
    cancelled: tuple[str, ...] = ()

    def with_part(self, part: Part) -> State:
        """Return the state with the task's part replaced; commands that are no longer outstanding are cancelled."""
        before = self.parts.get(part.task)
        gone: tuple[str, ...] = ()
        if before is not None and (before.plan != part.plan or not part.active):
            kept = part.outstanding()
            gone = tuple(cid for cid in before.outstanding() if cid not in kept)
        return replace(self, parts={**self.parts, part.task: part}, cancelled=self.cancelled + gone)

    def with_occupied(self, task: str, workers: Iterable[str]) -> State:
        """Return the state in which the task occupies exactly these workers."""
        return replace(self, occupied={**self.occupied, task: frozenset(workers)})

    def with_leaving(self, task: str, *, add: Iterable[str] = (), drop: Iterable[str] = ()) -> State:
        """Return the state with workers added to, and dropped from, those that the task is leaving."""
        workers = (self.leaving.get(task, frozenset()) | frozenset(add)) - frozenset(drop)
        return replace(self, leaving={**self.leaving, task: workers})

    def with_step(self, task: str, step: int) -> State:
        """Return the state in which the task is known to have reached ``step`` at least."""
        return replace(self, steps={**self.steps, task: max(step, self.steps.get(task, 0))})

    def alive(self, workers: Iterable[str]) -> frozenset[str]:
        """Return those of the workers whose node is not lost."""
        return frozenset(worker for worker in workers if node_of(worker) not in self.lost)

    def occupied_by_others(self, task: str, worker: str) -> bool:
        """Whether another task may still have a process on the worker.

        A task that has ended and has nothing left to do does not count: its processes exit by themselves.
        """
        for other, workers in self.occupied.items():
            if other == task or worker not in workers:
                continue
            part = self.parts.get(other)
            if other not in self.ended or (part is not None and part.active):
                return True
        return False


def node_of(worker: str) -> str:
    """Return the node in a worker's id, ``<node>/<slot>``."""
    return worker.rpartition("/")[0]
