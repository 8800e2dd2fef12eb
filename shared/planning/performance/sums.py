"""Sums in a stated order. The built-in ``sum`` rounds differently from Python 3.12 on; plans replay to the byte."""

from __future__ import annotations

from collections.abc import Iterable


def total(values: Iterable[float]) -> float:
    """Return the sum, added from the first to the last."""
    found = 0.0
    for value in values:
        found = found + value
    return found
