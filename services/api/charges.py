"""Charges: claims settled so that every second of every worker counts once, and their sums. Pure.

``services/api/claims.py`` makes the claims; ``services/api/costs.py`` makes the report from the charges.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from services.api.claims import FAILURE_PARTS, Claim, Part

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Charge:
    """A settled claim. ``worker_s``: the worker-seconds of the claim that no earlier claim covers."""

    claim: Claim
    worker_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Worker-seconds of the four failure parts, the weighted FLOP not achieved in them, and their price."""

    detection_worker_s: float = 0.0
    transition_worker_s: float = 0.0
    recompute_worker_s: float = 0.0
    sub_healthy_worker_s: float = 0.0
    lost_flop: float = 0.0
    money: float = 0.0

    @property
    def worker_s(self) -> float:
        """All four parts together."""
        return self.detection_worker_s + self.transition_worker_s + self.recompute_worker_s + self.sub_healthy_worker_s


def money(worker_s: float, price_per_worker_hour: float) -> float:
    """Return the price of ``worker_s`` worker-seconds."""
    return worker_s * price_per_worker_hour / SECONDS_PER_HOUR


def settle(claims: Iterable[Claim]) -> list[Charge]:
    """Charge every second of every worker to the first claim on it, in the order of ``claims``.

    For one worker the charges add up to the length of the union of its claims.
    """
    taken: dict[str, list[tuple[float, float]]] = {}
    charges = []
    for claim in claims:
        spans = taken.setdefault(claim.worker, [])
        charges.append(Charge(claim, _take(spans, claim.start_s, claim.end_s)))
    return charges


def _take(spans: list[tuple[float, float]], start: float, end: float) -> float:
    """Add ``[start, end)`` to the disjoint, sorted ``spans``; return how much of it was free."""
    if end <= start:
        return 0.0
    index = max(bisect_left(spans, (start, start)) - 1, 0)
    low, high, free, at = start, end, 0.0, start
    while index < len(spans) and spans[index][0] <= end:
        left, right = spans[index]
        if right < start:
            index += 1
            continue
        free += max(left - at, 0.0)
        at = max(at, right)
        low, high = min(low, left), max(high, right)
        del spans[index]
    free += max(end - at, 0.0)
    insort(spans, (low, high))
    return free


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
        sub_healthy_worker_s=seconds[Part.SUB_HEALTHY],
        lost_flop=lost_flop,
        money=money(sum(seconds.values()), price_per_worker_hour),
    )


def worker_s(charges: Iterable[Charge], part: Part) -> float:
    """Return the worker-seconds of one part."""
    return sum(charge.worker_s for charge in charges if charge.claim.part is part)
