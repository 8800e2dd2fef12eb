"""Times as sets of intervals: disjoint, in order, none of which touches the next. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[float, float]
"""Beginning and end (not included), in seconds since the epoch."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time that any intervals cover, as a set."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if not joined or start > joined[-1][1]:
            joined.append((start, end))
        elif end > joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
    return joined


def outside(intervals: Sequence[Interval]) -> list[Interval]:
    """Return all time outside of a set."""
    bounds = [-math.inf, *(bound for interval in intervals for bound in interval), math.inf]
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def overlapping(intervals: Sequence[Interval], start: float, end: float) -> Iterator[Interval]:
    """Yield the parts of a set between ``start`` and ``end``."""
    for index in range(max(bisect_right(intervals, (start, math.inf)) - 1, 0), len(intervals)):
        low, high = intervals[index]
        if low >= end:
            return
        if high > start:
            yield max(low, start), min(high, end)


def is_within(interval: Interval, intervals: Sequence[Interval]) -> bool:
    """Return whether a set covers all of an interval; an interval without time is covered."""
    start, end = interval
    if end <= start:
        return True
    index = bisect_right(intervals, (start, math.inf)) - 1  # the last interval that begins at the start, or before it
    return index >= 0 and intervals[index][1] >= end


def take(interval: Interval, taken: list[Interval]) -> tuple[Interval, ...]:
    """Add an interval that has some time to the set ``taken``, in place; return the parts of it that were free."""
    start, end = interval
    index = max(bisect_right(taken, (start, math.inf)) - 1, 0)
    low, high, at = start, end, start
    free = []
    while index < len(taken) and taken[index][0] <= end:
        left, right = taken[index]
        if right < start:
            index += 1
            continue
        if left > at:
            free.append((at, left))
        at = max(at, right)
        low, high = min(low, left), max(high, right)
        del taken[index]
    if end > at:
        free.append((at, end))
    insort(taken, (low, high))
    return tuple(free)
