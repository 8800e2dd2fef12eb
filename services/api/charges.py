"""Charges: claims settled so that every second of every worker counts once. Pure.

``services/api/claims.py`` and ``services/api/span_claims.py`` make the claims; ``services/api/ledger.py`` settles those
of a cluster; ``services/api/settlement.py`` adds the charges up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from services.api.claims import Claim
from services.api.intervals import Interval, is_within, outside, take

SECONDS_PER_HOUR = 3600.0


class Charge(NamedTuple):
    """What some workers of a claim are charged: each of them for ``intervals``, which no earlier claim covers."""

    claim: Claim
    workers: tuple[str, ...]
    intervals: tuple[Interval, ...]

    @property
    def each_s(self) -> float:
        """The seconds of each of its workers."""
        return sum(end - start for start, end in self.intervals)

    @property
    def worker_s(self) -> float:
        """Its worker-seconds."""
        return len(self.workers) * self.each_s


class _Alike:
    """Workers of which the same times are charged so far, as disjoint, sorted intervals ``taken``; ``count``: of them.

    Workers of one node or task mostly are, so that a second of them all is charged at once.
    """

    __slots__ = ("count", "taken")

    def __init__(self, taken: list[Interval], count: int = 0) -> None:
        self.taken, self.count = taken, count


def money(worker_s: float, price_per_worker_hour: float) -> float:
    """Return the price of ``worker_s`` worker-seconds."""
    return worker_s * price_per_worker_hour / SECONDS_PER_HOUR


def settle(claims: Iterable[Claim], allocated: Mapping[str, Sequence[Interval]] | None = None) -> list[Charge]:
    """Charge every second of every worker to the first claim on it, in the order of ``claims``.

    For one worker the charges add up to the length of the union of its claims. Workers of a claim of which different
    times were charged before have a charge each; those that earlier claims have all of the time of have none.

    Args:
        claims: the first come first.
        allocated: disjoint times of each worker, in order, outside of which nothing is charged; None: all time.
    """
    alike_of: dict[str, _Alike] = {}
    if allocated is not None:
        by_times: dict[tuple[Interval, ...], _Alike] = {}
        for worker, times in allocated.items():
            alike = alike_of[worker] = by_times.setdefault(tuple(times), _Alike(outside(times)))
            alike.count += 1
    # Of workers that have not been seen nobody knows how many there are: a part of them is never all of them.
    others = _Alike([] if allocated is None else [(-math.inf, math.inf)])
    parts: dict[tuple[str, ...], list[tuple[_Alike, tuple[str, ...]]]] = {}
    charges = []
    for claim in claims:
        interval = claim.start_s, claim.end_s
        if (alikes := parts.get(claim.workers)) is None:
            alikes = parts[claim.workers] = _parts(claim.workers, alike_of, others)
        for alike, workers in alikes:
            if is_within(interval, alike.taken):
                continue  # as of most claims: an earlier one has all of the time
            if len(workers) != alike.count:
                alike.count -= len(workers)
                alike = _Alike(list(alike.taken), len(workers))
                alike_of.update(dict.fromkeys(workers, alike))
                parts.clear()
            charges.append(Charge(claim, workers, take(interval, alike.taken)))
    return charges


def _parts(
    workers: Iterable[str], alike_of: Mapping[str, _Alike], others: _Alike
) -> list[tuple[_Alike, tuple[str, ...]]]:
    """Return which of some workers are alike. ``others``: what all that are in none of the groups are."""
    found: dict[_Alike, list[str]] = {}
    for worker in workers:
        found.setdefault(alike_of.get(worker, others), []).append(worker)
    return [(alike, tuple(part)) for alike, part in found.items()]
