"""Charges: claims settled so that every second of every worker counts once. Pure.

``shared/costs/claims.py`` and ``shared/costs/span_claims.py`` make the claims;
``shared/costs/ledger.py`` settles those of a cluster; ``shared/costs/settlement.py`` adds the charges up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shared.costs.claims import Claim
from shared.costs.intervals import Interval, is_within, outside, take

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


class _Group:
    """Workers of which the same times are charged so far: the set ``taken``. ``count``: how many workers.

    The workers of a node, or of a task, are mostly of one group, so that a second of them all is charged at once.
    """

    __slots__ = ("count", "taken")

    def __init__(self, taken: list[Interval], count: int = 0) -> None:
        self.taken, self.count = taken, count


def money(worker_s: float, price_per_worker_hour: float) -> float:
    """Return the price of ``worker_s`` worker-seconds."""
    return worker_s * price_per_worker_hour / SECONDS_PER_HOUR


def settle(claims: Iterable[Claim], allocated: Mapping[str, Sequence[Interval]] | None = None) -> list[Charge]:
    """Charge every second of every worker to the first claim on it, in the order of ``claims``.

    For one worker the charges add up to the length of the union of its claims. Workers of a claim get separate charges
    if different times of them were charged before. A worker whose time earlier claims have completely gets none.

    Args:
        claims: the first come first.
        allocated: disjoint times of each worker, in order, outside of which nothing is charged; None: all time.
    """
    groups: dict[str, _Group] = {}
    if allocated is not None:
        by_times: dict[int, _Group] = {}  # workers of the same times mostly have the same list of them
        for worker, times in allocated.items():
            if (key := id(times)) not in by_times:
                by_times[key] = _Group(outside(times))
            group = groups[worker] = by_times[key]
            group.count += 1
    # It is not known how many workers are in no group yet, so no claim is taken to have all of them.
    others = _Group([] if allocated is None else [(-math.inf, math.inf)])
    grouped: dict[tuple[str, ...], list[tuple[_Group, tuple[str, ...]]]] = {}
    charges = []
    for claim in claims:
        interval = claim.start_s, claim.end_s
        if claim.workers not in grouped:
            grouped[claim.workers] = _grouped(claim.workers, groups, others)
        for group, workers in grouped[claim.workers]:
            if is_within(interval, group.taken):
                continue  # most claims: an earlier one has all of the time
            if len(workers) != group.count:
                group.count -= len(workers)
                group = _Group(list(group.taken), len(workers))
                groups.update(dict.fromkeys(workers, group))
                grouped.clear()
            charges.append(Charge(claim, workers, take(interval, group.taken)))
    return charges


def _grouped(
    workers: tuple[str, ...], groups: Mapping[str, _Group], others: _Group
) -> list[tuple[_Group, tuple[str, ...]]]:
    """Return the groups of some workers, each with those in it. ``others``: the group of a worker without one."""
    distinct = {*map(groups.get, workers)}
    if len(distinct) == 1:  # as a rule; the workers are then not looked at one by one
        return [(distinct.pop() or others, workers)]
    found: dict[_Group, list[str]] = {}
    for worker in workers:
        found.setdefault(groups.get(worker, others), []).append(worker)
    return [(group, tuple(part)) for group, part in found.items()]
