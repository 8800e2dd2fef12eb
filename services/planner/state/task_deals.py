"""How a slow worker holds a task up: as a whole, or by the micro-batches that its replica is dealt."""

from __future__ import annotations

from collections.abc import Sequence

from services.planner.state.cluster import State, Task
from services.planner.state.dealing import deal_by_speed, equal_deal, replica_slowdowns, slowdown_of_deal
from services.planner.state.slow_workers import FULL_SPEED, hardware_of_worker, lent_workers, slowdown_of, taken_members
from shared.events.plans import Layout


def posed_slowdown(state: State, task: Task, pool: str) -> float:
    """Return by how much the slow workers that a question gives to a task hold it up, in that pool.

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
    """Return the task's deal by speed; empty if it has none, or has lost a worker: then all are dealt anew."""
    return () if task.lost or task.broken else task.shares


def fitting_deal(state: State, task: Task) -> list[int] | None:
    """Return the deal by speed of the task as it is; None if it has no slow member, or the deal would be the same.

    An interleaved pipeline takes only some numbers of micro-batches, so it keeps its equal deal.
    """
    layout = task.layout
    if layout is None or layout.world_size != len(task.members) or task.lost or task.broken:
        return None
    shares = shares_of(state, task, layout, task.members)
    return shares if shares and tuple(shares) != task.shares else None


def shares_of(state: State, task: Task, layout: Layout, members: Sequence[str]) -> list[int]:
    """Return the shares by speed of a stage with these members, in rank order; empty if they are the equal ones."""
    micro_batches = task.spec.batch.micro_batches
    if layout.data == 1 or micro_batches < layout.data or task.spec.parallel.interleave > 1:
        return []
    slowdowns = replica_slowdowns(layout, members, {worker: slowdown_of(state, worker) for worker in members})
    if max(slowdowns) == FULL_SPEED:
        return []
    shares = deal_by_speed(micro_batches, slowdowns)
    return shares if shares != equal_deal(micro_batches, layout.data) else []
