"""Random draws of the simulator: equal for a seed on every machine and with every version of Python.

The one source is ``random.Random.random``, whose sequence Python promises to keep for a seed (documentation of
``random``, "Notes on Reproducibility"). Everything else is transformed here, since no other method has that promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

Item = TypeVar("Item")


class Draws:
    """A stream of draws. ``purpose`` and ``seed`` select it: streams of different purposes are independent."""

    def __init__(self, purpose: str, seed: int) -> None:
        self._random = Random(f"{purpose}/{seed}").random  # nosec B311: no secret

    def uniform(self, low: float, high: float) -> float:
        """Return a number from ``low`` up to ``high``."""
        return low + (high - low) * self._random()

    def exponential(self, mean: float) -> float:
        """Return an exponentially distributed number: the inverse of its distribution, -mean ln(1 - u)."""
        return -mean * math.log1p(-self._random())

    def count(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""
        return low + min(int((high - low + 1) * self._random()), high - low)

    def one_of(self, items: Sequence[Item]) -> Item:
        """Return one of the items, each as probable."""
        return items[self.count(0, len(items) - 1)]

    def weighted(self, weights: Mapping[Item, float]) -> Item:
        """Return one of the items, as probable as its weight says."""
        left = self._random() * sum(weights.values())
        for item, weight in weights.items():
            left -= weight
            if left < 0:
                return item
        return item  # rounding left something over

    def times(self, number: int, horizon_s: float) -> list[float]:
        """Return the times of ``number`` events of a Poisson process up to a horizon, seconds, ascending.

        Given their number, the times of a Poisson process are independent and uniform (Kingman, Poisson Processes,
        section 2.4). They are whole milliseconds, so that a file has them exactly.
        """
        return sorted(round(self.uniform(0.0, horizon_s), 3) for _ in range(number))
