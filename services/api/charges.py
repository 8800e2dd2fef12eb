"""Charges: claims settled so that every second of every worker counts once. Pure.

``services/api/claims.py`` and ``services/api/span_claims.py`` make the claims; ``services/api/ledger.py`` settles those
of a cluster; ``services/api/settlement.py`` adds the charges up.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from services.api.claims import Claim

SECONDS_PER_HOUR = 3600.0

Interval = tuple[float, float]
"""From, and up to but without, in seconds since the epoch."""


class Charge(NamedTuple):
    """A settled claim. ``intervals``: the time of the claim that no earlier claim covers."""

    claim: Claim
    intervals: tuple[Interval, ...]

    @property
    def worker_s(self) -> float:
        """Its worker-seconds."""
        return sum(end - start for start, end in self.intervals)


def money(worker_s: float, price_per_worker_hour: float) -> float:
    """Return the price of ``worker_s`` worker-seconds."""
    return worker_s * price_per_worker_hour / SECONDS_PER_HOUR


def settle(claims: Iterable[Claim], allocated: Mapping[str, Sequence[Interval]] | None = None) -> list[Charge]:
    """Charge every second of every worker to the first claim on it, in the order of ``claims``.

    For one worker the charges add up to the length of the union of its claims.

    Args:
        claims: the first come first.
        allocated: disjoint times of each worker, in order, outside of which nothing is charged; None: all time.
    """
    taken: dict[str, list[Interval]] = {}
    if allocated is not None:
        taken = {worker: _outside(intervals) for worker, intervals in allocated.items()}
    charges = []
    for claim in claims:
        if allocated is not None and claim.worker not in taken:
            continue
        intervals = taken.setdefault(claim.worker, [])
        charges.append(Charge(claim, _take(intervals, claim.start_s, claim.end_s)))
    return charges


def _outside(intervals: Sequence[Interval]) -> list[Interval]:
    """Return all time but that of disjoint, sorted ``intervals``."""
    bounds = [-math.inf, *(bound for interval in intervals for bound in interval), math.inf]
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _take(taken: list[Interval], start: float, end: float) -> tuple[Interval, ...]:
    """Add ``[start, end)`` to the disjoint, sorted intervals ``taken``; return what of it was free."""
    if end <= start:
        return ()
    index = bisect_left(taken, (start, math.inf)) - 1  # the last that begins at the start, or before it
    if index >= 0 and taken[index][1] >= end:
        return ()  # as of most claims: an earlier one has all of the time
    index = max(index, 0)
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
