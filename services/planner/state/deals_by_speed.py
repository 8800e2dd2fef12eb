"""Micro-batches dealt by speed: a replica with a slow worker computes fewer of them, and holds its task up less.

The micro-batches of a step are whole, so a deal is integers that add up to the step's number. A step lasts as long as
its slowest replica takes. A replica's time is its share times its slowdown, which is that of its slowest worker. If a
replica is lost in mid-step, the ranks themselves deal out what it has not done (``unicron.join.dealing``).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from services.planner.state.cluster import State, Task
from services.planner.state.slow_workers import FULL_SPEED, hardware_of_worker, lent_workers, slowdown_of, taken_members
from shared.events.plans import Layout


def deal_by_speed(micro_batches: int, slowdowns: Sequence[float]) -> list[int]:
    """Return the share of each replica for which the step is shortest; at least one micro-batch each.

    Each micro-batch in turn goes to the replica that would then be done first (of equals, the lowest). For equal jobs
    on machines of fixed speeds that is optimal: no deal has a shorter longest time.

    Args:
        micro_batches: their number in a step, at least that of the replicas.
        slowdowns: one for each replica.
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
    """Return the shares without a deal by speed: round-robin (``unicron.join.dealing.share``)."""
    least, more = divmod(micro_batches, replicas)
    return [least + (replica < more) for replica in range(replicas)]


def slowdown_of_deal(shares: Sequence[int], slowdowns: Sequence[float]) -> float:
    """Return by how much a step lasts longer than one dealt equally to replicas at full speed; at least 1.0."""
    most = -(-sum(shares) // len(shares))
    return max(share * slowdown for share, slowdown in zip(shares, slowdowns, strict=True)) / most


def replica_slowdowns(layout: Layout, members: Sequence[str], slowdowns: Mapping[str, float]) -> list[float]:
    """Return the slowdown of each data-parallel replica: that of its slowest worker.

    Args:
        layout: the stage's.
        members: the stage's workers in rank order, ``tp-dp-pp``: rank = tensor + t * data + t * d * pipeline.
        slowdowns: those of slow workers.
    """
    found = [1.0] * layout.data
    for rank, worker in enumerate(members):
        replica = rank // layout.tensor % layout.data
        found[replica] = max(found[replica], slowdowns.get(worker, 1.0))
    return found


def posed_slowdown(state: State, task: Task, pool: str) -> float:
    """Return the factor by which the slow workers that a question gives to a task hold the task up in that pool.

    Without a deal by speed the whole task goes at the pace of the slowest. 1.0 outside questions.
    """
    if state.arrangement is None:
        return FULL_SPEED
    mine = lent_workers(state, task)
    shares = present_deal(task)
    slowest = max((mine[w] for w in mine if hardware_of_worker(state, w) == pool or not pool), default=FULL_SPEED)
    if taken_members(state, task) or not task.members:
        return slowest
    dealt = state.arrangement.dealt.get(task.name)
    if dealt:
        shares = tuple(fitting_deal(state, task) or ())
    if dealt is not False and shares and task.layout is not None:
        return slowdown_of_deal(shares, replica_slowdowns(task.layout, task.members, mine))
    return slowest


def present_deal(task: Task) -> tuple[int, ...]:
    """Return the task's deal by speed; empty if it has none, or has lost a worker and all are dealt anew."""
    return () if task.lost or task.broken else task.shares


def fitting_deal(state: State, task: Task) -> list[int] | None:
    """Return the deal by speed of the task as it is; None if no member is slow, or the deal would be the equal one.

    An interleaved pipeline takes only some numbers of micro-batches, so it keeps its equal deal.
    """
    layout = task.layout
    if layout is None or layout.world_size != len(task.members) or task.lost or task.broken:
        return None
    shares = shares_of(state, task, layout, task.members)
    return shares if shares and tuple(shares) != task.shares else None


def shares_of(state: State, task: Task, layout: Layout, members: Sequence[str]) -> list[int]:
    """Return the shares by speed of a stage with these members, in rank order; empty if the shares are equal."""
    micro_batches = task.spec.batch.micro_batches
    if layout.data == 1 or micro_batches < layout.data or task.spec.parallel.interleave > 1:
        return []
    slowdowns = replica_slowdowns(layout, members, {worker: slowdown_of(state, worker) for worker in members})
    if max(slowdowns) == FULL_SPEED:
        return []
    shares = deal_by_speed(micro_batches, slowdowns)
    return shares if shares != equal_deal(micro_batches, layout.data) else []
