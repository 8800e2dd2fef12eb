"""Sums in a defined order. Plans replay to the byte, and the built-in ``sum`` rounds differently from Python 3.12."""

from __future__ import annotations

from collections.abc import Iterable


def ordered_sum(values: Iterable[float]) -> float:
    """Return the sum, added from the first value to the last."""
    total = 0.0
    for value in values:
        total = total + value
    return total
