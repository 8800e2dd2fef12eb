"""What the transition service knows: the fold of the log, of agents' answers and of timers.

One ``Part`` is one task's part of one plan; a task has at most one (its newest). Everything here is immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from shared.commands import Command, Reply
from shared.events import Event, Recorded
from shared.plans import TaskChange
from shared.tasks import TaskSpec


class Phase(StrEnum):
    """The steps of a part, in the order in which they may start (``phases.AFTER``)."""

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
    """How a part stands. It leaves ``ACTIVE`` once."""

    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    """A newer plan took the task over, an agent has seen a newer generation, or the task ended by itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, from the settings.

    ``command_s``: an answer that waits for no training step. ``resume_s``: one that does. ``grace_s``: how long a
    failure that the detector hears of by itself waits for the plan that answers it. ``wait_s``: how long a part
    waits for another task to release a worker: the longest that task's own phases may take.
    """

    command_s: float = 60.0
    resume_s: float = 300.0
    grace_s: float = 2.0

    @property
    def wait_s(self) -> float:
        """Hold, interrupted stage, drain or stop, release of the other task: two waits for a step, three without."""
        return 2 * self.resume_s + 3 * self.command_s


# Inputs


@dataclass(frozen=True, slots=True)
class Logged:
    """A record of the log."""

    record: Recorded


@dataclass(frozen=True, slots=True)
class Replied:
    """An agent's answer; ``reply`` is None when none came in time."""

    command_id: str
    reply: Reply | None
    at: datetime


class TimerName(StrEnum):
    """What a timer is for: see ``Limits.grace_s`` and ``Limits.wait_s``."""

    GRACE = "grace"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A ``Timer`` ran out."""

    plan: str
    task: str
    name: TimerName
    at: datetime


Input = Logged | Replied | TimerFired


# Effects


@dataclass(frozen=True, slots=True)
class Send:
    """Ask the agent of ``node``; ``workers`` are the ones whose doing it depends on (blamed if it fails)."""

    node: str
    command: Command
    timeout_s: float
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for the answer to this command any more; do not send it again."""

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


# State


@dataclass(frozen=True, slots=True)
class Run:
    """A phase that has begun: what it sent and what came back."""

    started_at: datetime
    outstanding: Mapping[str, Send] = field(default_factory=dict)
    replies: tuple[Reply, ...] = ()
    silent: tuple[str, ...] = ()
    """Workers behind commands that timed out."""
    ended_at: datetime | None = None

    def seconds(self, now: datetime) -> float:
        """Wall time of the phase until its end, or until ``now``."""
        return max(0.0, ((self.ended_at or now) - self.started_at).total_seconds())


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a part cannot go on. ``known``: the detector hears of the cause by itself, so a plan is likely coming."""

    phase: Phase
    code: str
    detail: str
    workers: tuple[str, ...]
    known: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One task's part of one plan. ``generation``: of commands that belong to no stage."""

    plan: str
    incident: str | None
    change: TaskChange
    generation: int
    outcome: Outcome = Outcome.ACTIVE
    runs: Mapping[Phase, Run] = field(default_factory=dict)
    done: frozenset[Phase] = frozenset()
    ready: frozenset[str] = frozenset()
    """Workers of ``prepare`` whose process is up."""
    failures: tuple[Failure, ...] = ()
    timers: frozenset[TimerName] = frozenset()
    fired: frozenset[TimerName] = frozenset()
    moved: frozenset[str] = frozenset()
    """Phases of ``StateMoved`` that the log holds (or is about to)."""

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

    def with_run(self, phase: Phase, run: Run) -> Part:
        """Return the part with the phase's run replaced."""
        return replace(self, runs={**self.runs, phase: run})

    def ended(self, outcome: Outcome) -> Part:
        """Return the part as ended; nothing is outstanding any more."""
        runs = {phase: replace(run, outstanding={}) for phase, run in self.runs.items()}
        return replace(self, outcome=outcome, runs=runs)


@dataclass(frozen=True, slots=True)
class State:
    """Everything decisions use.

    ``occupied``: task -> workers that may carry a process of it. ``leaving``: task -> those whose process was told to
    end by the newest or an earlier plan, and has no successor so far. ``steps``: newest step known for a task.
    ``cancelled``: commands whose answers no longer matter, to be told to the shell.
    """

    limits: Limits = Limits()
    specs: Mapping[str, TaskSpec] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    generations: Mapping[str, int] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
    incarnations: Mapping[str, str] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    occupied: Mapping[str, frozenset[str]] = field(default_factory=dict)
    leaving: Mapping[str, frozenset[str]] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    cancelled: tuple[str, ...] = ()

    def with_part(self, part: Part) -> State:
        """Return the state with the task's part replaced; commands it no longer waits for are cancelled."""
        before = self.parts.get(part.task)
        gone: tuple[str, ...] = ()
        if before is not None and (before.plan != part.plan or not part.active):
            kept = part.outstanding()
            gone = tuple(cid for cid in before.outstanding() if cid not in kept)
        return replace(self, parts={**self.parts, part.task: part}, cancelled=self.cancelled + gone)

    def with_occupied(self, task: str, workers: Iterable[str]) -> State:
        """Return the state with exactly these workers occupied by the task."""
        return replace(self, occupied={**self.occupied, task: frozenset(workers)})

    def with_leaving(self, task: str, *, add: Iterable[str] = (), drop: Iterable[str] = ()) -> State:
        """Return the state in which further workers of the task are leaving, and some are not any more."""
        workers = (self.leaving.get(task, frozenset()) | frozenset(add)) - frozenset(drop)
        return replace(self, leaving={**self.leaving, task: workers})

    def with_step(self, task: str, step: int) -> State:
        """Return the state in which the task is known to have reached ``step`` at least."""
        return replace(self, steps={**self.steps, task: max(step, self.steps.get(task, 0))})

    def held_by_others(self, task: str, worker: str) -> bool:
        """Whether another task may still have a process on the worker.

        A task that has ended and has nothing left to do counts as gone: its processes exit by themselves.
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
