"""Whether a task trains slower after a transition than with the same layout before. Pure.

The newest steps of the generation are compared with the step times that the log has of the newest earlier generation
with the same tensor, pipeline and data sizes (``task.progressed``). Generations with another number of workers are not
compared: the planner judges what they should achieve, and corrects its throughput model.

**False alarms.** Both the median of 32 steps has to be ``FACTOR`` times the slowest rate of before, and their lower
quartile ``LEAST_FACTOR`` times: more than three in four steps are slower than any rate of before. With independent
steps of the same distribution as before that has a probability below 2**-32 a window; a machine that is busier than
before is no false alarm but the anomaly itself, once it has lasted for ``LEAST_S``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median

from shared.events.plans import Layout

WINDOW = 32
"""Steps that are judged together: all recent ones (``services.detector.state.task.RECENT_STEPS``)."""

WARM_UP = 8
"""Timed steps of a generation that come before those that are judged: caches fill, and snapshots and their threads
start."""

FACTOR = 1.2
"""Slowdown that is a regression: above the 1.1 that is the paper's warning level for a single step, and a fifth of the
task's throughput."""

LEAST_FACTOR = 1.1
"""Slowdown of the fastest quarter of the steps that a regression must have; with a smaller one the regression is
over."""

LEAST_S = 30.0
"""How long all newest steps have to show a regression. A window of steps of 0.05 s takes two seconds, and on busy cores
the medians of five seconds differ by a factor of two, while the rates of before are of 40 s. Where steps take a second,
the window is as long by itself."""

RATES = 8
"""Summaries of a generation that are remembered: as progress is recorded, those of most of its life."""

LAYOUTS = 16
"""Layouts of a task that are remembered."""


@dataclass(slots=True)
class LayoutRates:
    """Step times of a layout, seconds: of its newest generation, and of the one before that."""

    generation: int
    present_s: list[float] = field(default_factory=list)
    earlier_s: list[float] = field(default_factory=list)

    def add(self, generation: int, step_s: float) -> None:
        """Add a summary."""
        if generation != self.generation:
            self.generation, self.earlier_s, self.present_s = generation, self.present_s, []
        self.present_s = [*self.present_s, step_s][-RATES:]

    def before(self, generation: int) -> list[float]:
        """Return the step times of the generation before this one."""
        return self.earlier_s if generation == self.generation else self.present_s


@dataclass(slots=True)
class TaskRates:
    """The step times of a task's layouts, by their tensor, pipeline and data sizes."""

    by_layout: dict[str, LayoutRates] = field(default_factory=dict)

    def note(self, layout: Layout | None, generation: int, step_s: float) -> None:
        """Remember a summary of a generation."""
        key = _key(layout)
        known = self.by_layout.pop(key, None) or LayoutRates(generation)
        known.add(generation, step_s)
        self.by_layout[key] = known
        if len(self.by_layout) > LAYOUTS:
            del self.by_layout[next(iter(self.by_layout))]

    def before(self, layout: Layout | None, generation: int) -> list[float]:
        """Return the step times, seconds, that the layout had in its generation before this one."""
        known = self.by_layout.get(_key(layout))
        return known.before(generation) if known is not None else []


@dataclass(frozen=True, slots=True)
class Regression:
    """A regression that begins or is over; step times in seconds."""

    step_s: float
    expected_s: float
    ended: bool


def judge(recent_s: Sequence[float], before_s: Sequence[float], *, known: bool) -> Regression | None:
    """Return the regression that some steps show, or its end.

    Args:
        recent_s: the newest steps of this generation.
        before_s: the step times of before.
        known: whether the generation is known to have regressed.
    """
    if not before_s or len(recent_s) < WINDOW:
        return None
    expected_s = max(before_s)
    present_s = median(recent_s)
    quartile_s = sorted(recent_s)[len(recent_s) // 4]
    if known:
        return Regression(present_s, expected_s, ended=True) if present_s < LEAST_FACTOR * expected_s else None
    regressed = present_s >= FACTOR * expected_s and quartile_s >= LEAST_FACTOR * expected_s
    return Regression(present_s, expected_s, ended=False) if regressed else None


def has_lasted(recent_s: Sequence[float], since: datetime, now: datetime) -> bool:
    """Return whether a regression has lasted for ``LEAST_S``.

    Args:
        recent_s: the newest steps, which show it.
        since: when steps have shown it first, and all since then.
        now: the present time.
    """
    return (now - since).total_seconds() + sum(recent_s) >= LEAST_S


def _key(layout: Layout | None) -> str:
    return f"{layout.tensor}x{layout.pipeline}x{layout.data}" if layout is not None else ""
