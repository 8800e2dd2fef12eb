"""Micro-batches dealt by speed: a data-parallel replica with a slow worker computes fewer of them.

The micro-batches of a step are whole, so a deal is integers that add up to the step's number. A step lasts as long as
its slowest replica, whose time is its share times its slowdown (that of its slowest worker).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from shared.events.plans import Layout


def deal_by_speed(micro_batches: int, slowdowns: Sequence[float]) -> list[int]:
    """Return the share of each replica for which the step is shortest; at least one micro-batch each.

    Each micro-batch in turn goes to the replica that would then be done first (of equals, the lowest). For equal jobs
    on machines of fixed speeds that is optimal: no deal has a shorter longest time.

    Args:
        micro_batches: of a step, at least as many as replicas.
        slowdowns: of each replica.
    """
    shares = [1] * len(slowdowns)
    heap = [(2 * slowdown, replica) for replica, slowdown in enumerate(slowdowns)]
    heapq.heapify(heap)
    for _ in range(micro_batches - len(slowdowns)):
        _, replica = heap[0]
        shares[replica] += 1
        heapq.heapreplace(heap, ((shares[replica] + 1) * slowdowns[replica], replica))
    return shares


def equal_deal(micro_batches: int, replicas: int) -> list[int]:
    """Return the shares without a deal by speed: round-robin (``unicron.join.agreement.share``)."""
    least, more = divmod(micro_batches, replicas)
    return [least + (replica < more) for replica in range(replicas)]


def slowdown_of_deal(shares: Sequence[int], slowdowns: Sequence[float]) -> float:
    """Return by how much a step lasts longer than one dealt equally to replicas at full speed; at least 1.0."""
    most = -(-sum(shares) // len(shares))
    return max(share * slowdown for share, slowdown in zip(shares, slowdowns, strict=True)) / most


def replica_slowdowns(layout: Layout, members: Sequence[str], slowdowns: Mapping[str, float]) -> list[float]:
    """Return the slowdown of each data-parallel replica: that of its slowest worker.

    Args:
        layout: of the stage.
        members: its workers in rank order, ``tp-dp-pp``: rank = tensor + t * data + t * d * pipeline.
        slowdowns: of slow workers.
    """
    found = [1.0] * layout.data
    for rank, worker in enumerate(members):
        replica = rank // layout.tensor % layout.data
        found[replica] = max(found[replica], slowdowns.get(worker, 1.0))
    return found
