"""Pools: the workers of each kind of hardware, and which tasks belong to which pool.

A task runs on workers of one kind. Each pool is a problem of its own, solved exactly. Which pool a task belongs to is
a rule and not a part of the optimum:

1. A task stays on its kind while that kind can run it: heavy tasks first, and the least count of each must still fit.
2. All other tasks (new and queued ones, and those whose kind has become too small) go where their weighted FLOP/s are
   greatest on their fair share: the workers of the pool divided by weight among the pool's tasks and this one.
3. A task that fits nowhere waits for the pool where it would fit alone, or else for the largest pool.

So an idle pool of better workers gets new tasks and does not draw a running task from its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from services.planner.state.admission import least_count
from services.planner.state.cluster import State, Task, node_of
from services.planner.state.usable_nodes import usable_nodes
from shared.events.plans import TaskProblem
from shared.planning.waf import waf_flop_per_s

Pose = Callable[[Task, str], TaskProblem]
"""Returns the task's part of the problem, given the pool to which the task would belong."""


def pool_sizes(state: State, withheld: Collection[str]) -> dict[str, int]:
    """Return the workers of each kind that has a usable node, less the ``withheld`` ones, by the kinds' names."""
    sizes = dict(usable_nodes(state.nodes).workers)
    for worker in withheld:
        if state.usable(worker):
            sizes[state.nodes[node_of(worker)].hardware] -= 1
    return {kind: sizes[kind] for kind in sorted(sizes)} or {"": 0}


def present_kind(state: State, task: Task) -> str:
    """Return the kind of workers that the task is to run on or runs on; empty if it has none."""
    if task.pool or not task.members:
        return task.pool
    node = state.nodes.get(node_of(task.members[0]))
    return node.hardware if node is not None else ""


def settle(state: State, tasks: Sequence[Task], sizes: Mapping[str, int], pose: Pose) -> list[TaskProblem]:
    """Return the tasks' parts of the problem, each in its pool, in the order of ``tasks``.

    A task that has to leave its kind counts as faulted, since it is disturbed whatever its count.

    Args:
        state: for the kinds of the nodes.
        tasks: all tasks that want workers.
        sizes: workers of each pool.
        pose: makes a task's part of the problem.
    """
    left = dict(sizes)
    weights = dict.fromkeys(sizes, 0.0)
    found: dict[str, TaskProblem] = {}

    def put(posed: TaskProblem) -> None:
        found[posed.name] = posed
        weights[posed.pool] = weights[posed.pool] + posed.weight
        left[posed.pool] -= min(left[posed.pool], least_count(posed) or 0)

    order = sorted(tasks, key=lambda task: (not task.members, -task.spec.weight, task.name))
    homes = {task.name: present_kind(state, task) for task in order}
    homeless = []
    for task in order:
        posed = pose(task, homes[task.name]) if homes[task.name] in sizes else None
        if posed is not None and _fits(posed, left):
            put(posed)
        else:
            homeless.append(task)
    for task in homeless:
        choices = [pose(task, pool) for pool in sizes]
        fitting = [posed for posed in choices if _fits(posed, left)]
        if fitting:
            best = max(fitting, key=lambda p: _share_flop_per_s(p, sizes[p.pool], weights[p.pool]))
        else:
            best = max(choices, key=lambda p: (_fits(p, sizes), p.pool == homes[p.name], sizes[p.pool]))
        moves = bool(task.members) and best.pool != homes[task.name]
        put(best.model_copy(update={"faulted": True}) if moves else best)
    return [found[task.name] for task in tasks]


def _fits(task: TaskProblem, room: Mapping[str, int]) -> bool:
    """Return whether the least count of the task fits into what its pool has left."""
    least = least_count(task)
    return least is not None and least <= room[task.pool]


def _share_flop_per_s(task: TaskProblem, workers: int, weights: float) -> float:
    """Return F of the task on its fair share of a pool whose tasks have these weights, or on its least count."""
    total = weights + task.weight
    share = workers * task.weight / total if total > 0.0 else float(workers)
    least = least_count(task) or 0
    useful = [k for k in task.throughput if k <= max(share, least) and k <= task.maximum]
    return max((waf_flop_per_s(task, k) for k in useful), default=0.0)
