"""Whether a task's loss is far above its recent past: a robust z-score of each step's loss. Pure.

The past are the losses of the newest ``WINDOW`` steps that were no spike; its scale is their median absolute deviation.
The loss of training falls slowly beside the window, so the test looks upwards only. Values that are not finite are an
error of their own, which the rank reports.

**False alarms.** ``DEVIATIONS`` robust standard deviations are exceeded once in 1e15 steps of normal noise; of any
noise with one mode by fewer than one step in 144 (Vysochanskij and Petunin 1980), so ``LEAST_SCALE`` asks for more: a
loss that is a sixth above the median of its past is worth a look. A single hard batch may exceed that too (once in
19,000 steps of the soak of ``benchmarks/detection.py``, by 11.5 deviations and a factor of 1.7). So a spike takes two
steps in succession, or one beyond what a hard batch does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

WINDOW = 64
"""Number of losses of the past: enough for a median absolute deviation within a tenth, few enough to follow the loss
down."""

LEAST_PAST = 16
"""Fewest losses of the past to compare with."""

DEVIATIONS = 8.0
"""Robust standard deviations above the median from which on two losses in succession are a spike. Chosen: see above."""

AT_ONCE = 16.0
"""Robust standard deviations from which on a single loss is a spike: twice ``DEVIATIONS``."""

AT_ONCE_FACTOR = 2.0
"""Multiple of the median from which a single loss beyond ``DEVIATIONS`` is a spike: while the loss still falls fast,
its scale is large beside it."""

OVER_DEVIATIONS = 4.0
"""The number of deviations below which a spike is over: half, so that one spike is not several."""

LEAST_SCALE = 0.02
"""Smallest scale, as a part of the median: a past that hardly varies makes no spike of a small step upwards. With
``DEVIATIONS`` the least rise is 16%."""

_MAD_TO_SIGMA = 1.4826
"""Standard deviation of normal values over their median absolute deviation: 1 / 0.6745."""


@dataclass(frozen=True, slots=True)
class Spike:
    """A loss that begins a spike, or ends one. ``deviations``: robust standard deviations above ``expected``."""

    step: int
    loss: float
    expected: float
    deviations: float
    ended: bool


@dataclass(slots=True)
class LossWindow:
    """The recent losses of one task, over all its generations.

    Attributes:
        step: the newest that was taken.
        past: losses that were no spike.
        suspect: the newest loss, if it will be a spike should the next loss be high, too.
        above: losses of the spike that lasts. After ``WINDOW`` of them they become the past, since the loss has a new
            level.
    """

    step: int = 0
    past: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    suspect: float | None = None
    above: list[float] = field(default_factory=list)

    def take(self, step: int, loss: float, expected: float | None) -> Spike | None:
        """Take the loss of a step; return the spike that begins or ends with it.

        Args:
            step: its number; a step that was taken before, as after a fault, changes nothing.
            loss: the step's loss, which is finite.
            expected: the usual loss of the spike that is known to last; None if there is none.
        """
        if step <= self.step:
            return None
        self.step = step
        if expected is None and len(self.past) < LEAST_PAST:
            self.past.append(loss)
            return None
        usual, deviations = self._judge(loss, expected)
        if expected is None:
            suspect, self.suspect = self.suspect, None
            if deviations <= DEVIATIONS:
                self.past.extend([loss] if suspect is None else [suspect, loss])
                return None
            if suspect is None and deviations <= AT_ONCE and not 0.0 < AT_ONCE_FACTOR * usual <= loss:
                self.suspect = loss
                return None
            self.above = [loss] if suspect is None else [suspect, loss]
            return Spike(step, loss, usual, deviations, ended=False)
        if deviations >= OVER_DEVIATIONS:
            self.above.append(loss)
            if len(self.above) < WINDOW:
                return None
            self.past.extend(self.above)
        else:
            self.past.append(loss)
        self.above = []
        return Spike(step, loss, usual, deviations, ended=True)

    def _judge(self, loss: float, expected: float | None) -> tuple[float, float]:
        """Return the usual loss, and how many deviations this one is above it."""
        usual = median(self.past) if len(self.past) >= LEAST_PAST or expected is None else expected
        spread = median([abs(value - usual) for value in self.past]) if self.past else 0.0
        scale = max(_MAD_TO_SIGMA * spread, LEAST_SCALE * abs(usual))
        return usual, (loss - usual) / scale if scale > 0.0 else 0.0
