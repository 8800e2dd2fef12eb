"""Charges: claims settled so that every second of every worker counts once, and their sums. Pure.

``services/api/claims.py`` and ``services/api/span_claims.py`` make the claims; ``services/api/ledger.py`` settles those
of a cluster; ``services/api/costs.py`` makes the report from the charges.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.api.claims import FAILURE_PARTS, Claim, Part

SECONDS_PER_HOUR = 3600.0

Interval = tuple[float, float]
"""From, and up to but without, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Charge:
    """A settled claim. ``intervals``: the time of the claim that no earlier claim covers."""

    claim: Claim
    intervals: tuple[Interval, ...]

    @property
    def worker_s(self) -> float:
        """Its worker-seconds."""
        return sum(end - start for start, end in self.intervals)

    def between(self, start_s: float, end_s: float) -> float:
        """Return the worker-seconds between two times."""
        return sum(max(min(end, end_s) - max(start, start_s), 0.0) for start, end in self.intervals)


@dataclass(frozen=True, slots=True)
class Cost:
    """Worker-seconds of the failure parts, the weighted FLOP not achieved in them, and their price.

    ``sub_healthy_worker_s``: all time in which capacity was missing: of lost workers (``lost_worker_s``), and of those
    that were present and not used as well as without the incident.
    """

    detection_worker_s: float = 0.0
    transition_worker_s: float = 0.0
    recompute_worker_s: float = 0.0
    sub_healthy_worker_s: float = 0.0
    lost_worker_s: float = 0.0
    lost_flop: float = 0.0
    money: float = 0.0

    @property
    def worker_s(self) -> float:
        """All failure parts together."""
        return self.detection_worker_s + self.transition_worker_s + self.recompute_worker_s + self.sub_healthy_worker_s


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
    index = max(bisect_left(taken, (start, start)) - 1, 0)
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


def total(charges: Iterable[Charge], price_per_worker_hour: float) -> Cost:
    """Return the sums of the failure parts of ``charges``.

    ``lost_flop``: worker-seconds times the weighted FLOP/s that one worker achieved before. ``money``: worker-seconds
    times the price.
    """
    seconds = dict.fromkeys(FAILURE_PARTS, 0.0)
    lost_flop = 0.0
    for charge in charges:
        if charge.claim.part in seconds:
            seconds[charge.claim.part] += charge.worker_s
            lost_flop += charge.worker_s * charge.claim.flop_per_worker_s
    return Cost(
        detection_worker_s=seconds[Part.DETECTION],
        transition_worker_s=seconds[Part.TRANSITION],
        recompute_worker_s=seconds[Part.RECOMPUTE],
        sub_healthy_worker_s=seconds[Part.LOST] + seconds[Part.SUB_HEALTHY],
        lost_worker_s=seconds[Part.LOST],
        lost_flop=lost_flop,
        money=money(sum(seconds.values()), price_per_worker_hour),
    )


def worker_s(charges: Iterable[Charge], part: Part) -> float:
    """Return the worker-seconds of one part."""
    return sum(charge.worker_s for charge in charges if charge.claim.part is part)
