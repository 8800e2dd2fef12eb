"""The training of one task in simulated time: its updates, its newest checkpoint, and how fast it goes.

Between two changes of its rate a task advances evenly, so updates and checkpoints are computed and no step is an event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from services.planner.throughput.model import flop_per_step
from shared.events.plans import Layout, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.tasks.specification import TaskSpec
from simulator.policy import Lost
from simulator.run.agenda import Entry


@dataclass(frozen=True, slots=True)
class Formation:
    """What a task trains on: the members of a stage in rank order, their nodes, its layout, and its deal."""

    generation: int
    members: tuple[str, ...]
    nodes: frozenset[str]
    layout: Layout
    shares: tuple[int, ...] = ()


@dataclass(slots=True)
class Part:
    """The task's part of a plan that is carried out. ``nodes``: of all its members. ``entries``: what is still to come.

    ``stopped``: whether the task makes no progress because of it.
    """

    plan: str
    incident: str | None
    change: TaskChange
    nodes: frozenset[str]
    stopped: bool
    entries: list[Entry] = field(default_factory=list)

    def cancel(self) -> None:
        """Have nothing more of the part happen."""
        for entry in self.entries:
            entry.cancel()


@dataclass
class Training:
    """One task.

    Attributes:
        spec: its specification, as the policy has pinned it.
        checkpoint_every_s: seconds of training between two checkpoints.
        step: updates that exist, with the fraction of the present step that is done.
        saved_step: of the newest checkpoint.
        logged_step: of the newest checkpoint that the log has.
        peak: the highest step that it has reached.
        recomputed: updates that were lost, and that no event has reported yet.
        steps_per_s: present rate.
        formation: what it trains on, or trained on before a fault; None: it has no workers.
        part: its part of the newest plan, until all of it is done.
        faults: when the faults occurred from which it has not recovered.
        answers: plans that have stopped it. A count tells plan and fault of one moment apart.
        cause: severity and kind of the newest fault.
        finish: the entry of its end, as far as its rate lets foresee it.
        ended: whether all its steps are done.
    """

    spec: TaskSpec
    checkpoint_every_s: float
    step: float = 0.0
    saved_step: int = 0
    logged_step: int = 0
    peak: float = 0.0
    recomputed: int = 0
    steps_per_s: float = 0.0
    formation: Formation | None = None
    part: Part | None = None
    faults: list[float] = field(default_factory=list)
    answers: int = 0
    cause: tuple[Severity, ErrorKind] | None = None
    finish: Entry | None = None
    ended: bool = False
    step_s: float = 0.0
    """Duration of a step of the formation at its full rate; 0: it makes none."""
    _at_s: float = 0.0
    _unsaved_s: float = 0.0
    _lost_step_worker_s: float = 0.0

    @property
    def name(self) -> str:
        """The task's name."""
        return self.spec.name

    @property
    def steps(self) -> int:
        """Whole updates that exist."""
        return min(math.floor(self.step), self.spec.steps)

    @property
    def waf_flop_per_s(self) -> float:
        """Weighted model FLOP/s at the present rate."""
        return self._weighted_flop * self.steps_per_s

    @property
    def waf_flop(self) -> float:
        """Weighted model FLOP of the updates that exist."""
        return self._weighted_flop * min(self.step, float(self.spec.steps))

    @cached_property
    def _weighted_flop(self) -> float:
        """Weighted model FLOP of an update."""
        return self.spec.weight * flop_per_step(self.spec)

    def advance(self, now_s: float) -> None:
        """Let the task train up to a time; note the newest checkpoint that it has written on the way."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        if self.steps_per_s <= 0.0 or passed_s <= 0.0:
            return
        self.step += self.steps_per_s * passed_s
        self.peak = max(self.peak, self.step)
        self._unsaved_s += passed_s
        if self._unsaved_s >= self.checkpoint_every_s:
            self._unsaved_s %= self.checkpoint_every_s
            self.saved_step = math.floor(self.step - self.steps_per_s * self._unsaved_s)

    def go_on(self, now_s: float, steps_per_s: float) -> None:
        """Train at another rate from a time on."""
        self.advance(now_s)
        self.steps_per_s = steps_per_s

    def lose(self, lost: Lost) -> None:
        """Lose what a recovery loses. The updates in a checkpoint always remain.

        Back at a checkpoint, updates that an earlier fault had cost and that were not made again are lost once more.
        """
        before = self.steps
        if lost != "nothing" and self.formation is not None:
            self._lost_step_worker_s = self.step_s * len(self.formation.members)
        if lost == "checkpoint":
            self.step = float(min(self.saved_step, before))
            self._unsaved_s = 0.0
            self.recomputed = max(min(math.floor(self.peak), self.spec.steps) - self.steps, 0)
        elif lost == "step":
            self.step = float(before)

    def lost_worker_s(self) -> float:
        """Return the worker-seconds of progress that was lost and is not made again yet.

        Each step counts as one of the workers that had it when it was lost.
        """
        return 0.0 if self.ended else max(self.peak - self.step, 0.0) * self._lost_step_worker_s

    def save(self) -> None:
        """Write a checkpoint of the whole updates; the step in progress is left."""
        self.step = float(self.steps)
        self.saved_step, self._unsaved_s = self.steps, 0.0

    def remaining_s(self) -> float:
        """Return the seconds to the last update at the present rate."""
        return (self.spec.steps - self.step) / self.steps_per_s if self.steps_per_s > 0.0 else math.inf
