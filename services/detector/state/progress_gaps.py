"""For how long the ranks of a task go without progress in each phase, and what limit for a hang follows. Pure.

Agents report with each heartbeat the longest times without progress that have ended since the one before
(``WorkerStatus.gaps_s``). So each rank has a distribution of its own for each phase: a phase that takes 5 ms has a
shorter limit than one of seconds. The limit of a rank in a phase (``ProgressGaps.limit``) is::

    min(2 p99(step) - latency, max(3 p99(gap), p50(gap) (p99(gap) / p50(gap))^3))

but not below the floor nor below 1.5 times the longest gap that is remembered. The second term in the maximum is the
quantile of a log-normal distribution seven standard deviations above its median (its p99 is 2.33 above), which for a
heavy tail is far above its p99. Quantiles stay what they are when one gap in a hundred is an outlier.

The distributions outlive a generation (``ProgressHistory``), but nothing is noted of a generation's first steps, which
are judged by their mean. If they are slower than nearly all steps before, what was known is scaled.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from shared.events.plans import Layout, Member

WINDOW = 128
"""Number of values that are kept: half a minute of heartbeats at least, or as many steps where these are longer. The
99th percentile is the largest value but one."""

WARM_UP = 32
"""Number of values before the distribution counts: until then the limits of the mean apply."""

FIRST_STEPS = 8
"""Number of first steps of a generation of which nothing is noted: kernels are tuned in them, memory is allocated,
caches are filled. A gap of a minute in them would be the longest gap for an hour."""

COMPARED_STEPS = 3
"""Least number of a generation's first steps that tell whether it is slower than those before: one of three may be
long. Where steps are shorter than an interval of heartbeats, not all are reported."""

QUANTILE = 0.99

STEP_FACTOR = 2.0
"""Multiple of the 99th percentile of the steps within which a hang is found: a rank that makes no progress for longer
than a step takes is late in any case, and 2 leaves room for a change of speed."""

GAP_FACTOR = 3.0
"""Multiple of the 99th percentile of the gaps of a phase: that of the Unicron paper (section 4.1) for the mean step."""

TAIL_EXPONENT = 3.0
"""Power of p99/p50 that is taken for the tail: seven standard deviations of a log-normal distribution over the 2.33 of
its p99. One gap in 8e11 of such a distribution is longer."""

LONGEST_FACTOR = 1.5
"""No limit is below this multiple of the longest gap that is remembered: a stall of the data, a pause for garbage or
another task's burst that came once comes again."""

LONGEST_DECAY = 0.5 ** (1 / 5000)
"""Factor by which the longest gap shrinks with each further gap: half after 21 minutes of heartbeats, so that what
comes every ten minutes is expected all the time (1.5 times 0.7 of it), and what came once is forgotten within some
hours."""

REFRESH = 8
"""Values after which quantiles are computed anew."""

LAYOUTS = 4
"""Number of layouts of a task that are remembered: those before and after a loss of workers, and those of the survivors
of both. A layout of 1,000 ranks with five phases each takes 7 MB (tracemalloc)."""


class RecentTimes:
    """The newest of a series of times in seconds, and the longest of all as far as it is remembered.

    Attributes:
        count: how many there have been.
        longest_s: the longest; each further one takes a little off it.
    """

    __slots__ = ("_fresh", "_quantiles", "_values", "count", "longest_s")

    def __init__(self) -> None:
        self._values = array("d")
        self._quantiles: tuple[float, float] = (0.0, 0.0)
        self._fresh = 0
        self.count = 0
        self.longest_s = 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecentTimes) and (self.count, self._values) == (other.count, other._values)

    def note(self, seconds: float) -> None:
        """Add a time."""
        if len(self._values) < WINDOW:
            self._values.append(seconds)
        else:
            self._values[self.count % WINDOW] = seconds
        self.count += 1
        self._fresh -= 1
        self.longest_s = max(seconds, self.longest_s * LONGEST_DECAY)

    def scaled(self, factor: float) -> RecentTimes:
        """Return these times, each multiplied."""
        found = RecentTimes()
        found._values = array("d", (factor * value for value in self._values))
        found.count, found.longest_s = self.count, factor * self.longest_s
        return found

    def remembered(self, factor: float) -> RecentTimes:
        """Return no times, but the memory of the longest of these times, multiplied."""
        found = RecentTimes()
        found.longest_s = factor * self.longest_s
        return found

    @property
    def warm(self) -> bool:
        """Whether there have been enough for a distribution."""
        return self.count >= WARM_UP

    @property
    def samples(self) -> int:
        """How many times are kept."""
        return len(self._values)

    @property
    def median_s(self) -> float:
        """The median; 0 if there is none."""
        return self._computed()[0]

    @property
    def p99_s(self) -> float:
        """The 99th percentile (nearest rank); 0 if there is none."""
        return self._computed()[1]

    def _computed(self) -> tuple[float, float]:
        if self._fresh <= 0 and self._values:
            ordered = sorted(self._values)
            rank = math.ceil(QUANTILE * len(ordered)) - 1
            self._quantiles, self._fresh = (ordered[len(ordered) // 2], ordered[rank]), REFRESH
        return self._quantiles


@dataclass(frozen=True, slots=True)
class HangLimit:
    """For how long ranks may make no progress.

    Attributes:
        limit_s: seconds.
        source: what it comes from: ``floor``, ``step`` or ``phase`` (the quantile that is multiplied), ``longest`` (the
            longest gap that is remembered), ``slow-region`` (the hard bound), ``mean`` (of the steps, until their
            distribution is known), ``first-step``, ``setup``, ``collective`` or ``stopped``.
        quantile_s: the 99th percentile from which it was made, seconds; None if it was made from none.
        factor: what the percentile was multiplied by.
        samples: how many values the quantile was taken from.
    """

    limit_s: float
    source: str
    quantile_s: float | None = None
    factor: float | None = None
    samples: int = 0

    def evidence(self) -> dict[str, Any]:
        """Return what the evidence of a hang says of its limit."""
        shown = {"limit_s": self.limit_s, "limit_source": self.source, "limit_samples": self.samples}
        if self.quantile_s is not None:
            shown |= {"limit_quantile_s": self.quantile_s, "limit_factor": self.factor}
        return shown


@dataclass(frozen=True, slots=True)
class GapLimits:
    """Hard bounds, and how late a hang is seen. Seconds.

    Attributes:
        floor_s: no limit is shorter.
        bound_s: no limit is longer.
        latency_s: between the time at which a limit is exceeded and the time at which that is known, at most.
    """

    floor_s: float
    bound_s: float
    latency_s: float


class ProgressGaps:
    """The gaps of one task's ranks in one layout, and its steps.

    Attributes:
        steps: durations of the task's steps.
    """

    __slots__ = ("_first_steps_s", "_gaps", "_settled", "_stages", "_steps_timed", "steps")

    def __init__(self) -> None:
        self.steps = RecentTimes()
        self._gaps: dict[tuple[str, str], RecentTimes] = {}
        self._stages: Mapping[str, int] = {}
        self._steps_timed = 0
        self._first_steps_s: list[float] = []
        self._settled = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProgressGaps) and (self.steps, self._gaps) == (other.steps, other._gaps)

    def begin(self, stages: Mapping[str, int]) -> None:
        """Begin a generation of the layout.

        Args:
            stages: worker -> pipeline stage. Gaps of a worker that had another one are forgotten: it computes another
                part. Among the ranks of a stage, recoveries deal the workers anew.
        """
        same = {worker for worker, stage in stages.items() if self._stages.get(worker) == stage}
        self._gaps = {(worker, phase): gaps for (worker, phase), gaps in self._gaps.items() if worker in same}
        self._stages = stages
        self._steps_timed, self._first_steps_s, self._settled = 0, [], False

    def note_step(self, steps_timed: int, step_s: float) -> None:
        """Take the duration of a step. ``steps_timed``: its number; one that is known is not taken again."""
        if steps_timed <= self._steps_timed:
            return
        self._steps_timed = steps_timed
        if self._settled:
            self.steps.note(step_s)
            return
        self._first_steps_s.append(step_s)
        if steps_timed >= FIRST_STEPS and (not self.steps.count or len(self._first_steps_s) >= COMPARED_STEPS):
            self._settle()

    def _settle(self) -> None:
        """End the first steps of the generation.

        If these are slower than nearly all steps before, the steps are taken to vary as before, in proportion. It is
        not known which phases have become slower: the gaps of all begin anew, and until they are known the limit of the
        steps holds.
        """
        present_s, past_s = median(self._first_steps_s), self.steps.median_s
        if self.steps.count and present_s > self.steps.p99_s:
            factor = present_s / past_s if past_s > 0.0 else 1.0
            self.steps = self.steps.scaled(factor) if past_s > 0.0 else RecentTimes()
            self._gaps = {place: gaps.remembered(factor) for place, gaps in self._gaps.items()}
        self._first_steps_s, self._settled = [], True

    def note(self, worker: str, phase: str, seconds: float) -> None:
        """Take a time without progress of a rank in a phase, after the first steps."""
        if self._settled:
            self._gaps.setdefault((worker, phase), RecentTimes()).note(seconds)

    def of(self, worker: str, phase: str) -> RecentTimes | None:
        """Return the gaps of a rank in a phase; None if there were none."""
        return self._gaps.get((worker, phase))

    def step_limit(self, limits: GapLimits) -> HangLimit | None:
        """Return the limit that follows from the steps alone, without hard bounds; None where ``limit`` gives None."""
        if not (self._settled and self.steps.warm):
            return None
        step_s = self.steps.p99_s
        return HangLimit(STEP_FACTOR * step_s - limits.latency_s, "step", step_s, STEP_FACTOR, self.steps.samples)

    def limit(self, worker: str, phase: str | None, limits: GapLimits) -> HangLimit | None:
        """Return for how long a rank may make no progress in a phase; None: too little is known, or in the first steps.

        Where the phase's own gaps are too few, its limit is that of the steps: phases that are shorter than the
        interval of reports are seldom seen.
        """
        found = self.step_limit(limits)
        if found is None:
            return None
        gaps = self.of(worker, phase or "")
        if gaps is not None and gaps.warm:
            factor = max(GAP_FACTOR, _tail_factor(gaps))
            if factor * gaps.p99_s < found.limit_s:
                found = HangLimit(factor * gaps.p99_s, "phase", gaps.p99_s, factor, gaps.samples)
        if gaps is not None and found.limit_s < LONGEST_FACTOR * gaps.longest_s:
            found = HangLimit(LONGEST_FACTOR * gaps.longest_s, "longest", None, LONGEST_FACTOR, gaps.samples)
        if found.limit_s < limits.floor_s:
            return HangLimit(limits.floor_s, "floor", found.quantile_s, found.factor, found.samples)
        return found if found.limit_s <= limits.bound_s else HangLimit(limits.bound_s, "slow-region")


def _tail_factor(gaps: RecentTimes) -> float:
    """Return what the 99th percentile is to be multiplied by for its distribution's tail."""
    if gaps.median_s <= 0.0:
        return GAP_FACTOR
    return float((gaps.p99_s / gaps.median_s) ** (TAIL_EXPONENT - 1.0))


class ProgressHistory:
    """The progress of one task.

    Attributes:
        present: the progress of its present layout.
    """

    __slots__ = ("_by_layout", "present")

    def __init__(self) -> None:
        self.present = ProgressGaps()
        self._by_layout: dict[Layout, ProgressGaps] = {}  # the newest comes last

    def __eq__(self, other: object) -> bool:
        """Compare what was learnt: a layout in which nothing was measured yet counts as none."""
        return isinstance(other, ProgressHistory) and (self.present, self._learnt()) == (other.present, other._learnt())

    def _learnt(self) -> dict[Layout, ProgressGaps]:
        return {layout: gaps for layout, gaps in self._by_layout.items() if gaps != ProgressGaps()}

    def enter(self, layout: Layout, members: Iterable[Member]) -> None:
        """Begin a generation.

        Args:
            layout: of the generation.
            members: its ranks.
        """
        known = self._by_layout.pop(layout, None)
        self.present = self._by_layout[layout] = known if known is not None else ProgressGaps()
        self.present.begin({member.worker: layout.pipeline_stage(member.rank) for member in members})
        if len(self._by_layout) > LAYOUTS:
            del self._by_layout[next(iter(self._by_layout))]
