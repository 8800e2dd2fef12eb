"""Advice on checkpoints: how long each task should train between two of them, from the measured rate of node losses.

The specification says how many steps there are between two checkpoints (``checkpoint.every``); a plan says how many
seconds would lose the least (``services.planner.checkpoint_advice``).

A checkpoint costs time each time, and a failure costs what was done since the newest one. Young (Communications of the
ACM 17, 1974): the sum is least at the square root of 2 x cost x mean time between failures. Daly (Future Generation
Computer Systems 22, 2006, equation 37) corrects that where checkpoints are not cheap.

Copies in memory are a second level (Moody et al., SC 2010): most failures never read a checkpoint from storage. Only
failures that lose the copies, too, count for storage. These are rarer by the probability that a second node, which has
the copy, is lost before the copy is made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from math import sqrt

from services.planner.placement.transition_costs import on_grid, recovery_s, saving_s
from services.planner.problem.problem import node_mtbf_s
from services.planner.state.cluster import State, Task
from services.planner.state.usable_nodes import nodes_of
from shared.errors import InvalidInput
from shared.events.plans import TaskChange


def interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time to train between two checkpoints, seconds, without the checkpoint itself (Daly, equation 37).

        sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C   for C < 2 M, else M

    Args:
        cost_s: C, the time for which training stops for a checkpoint.
        mtbf_s: M, mean time between the failures after which the newest checkpoint is read.

    Raises:
        InvalidInput: a time is not positive.
    """
    for name, value in (("cost_s", cost_s), ("mtbf_s", mtbf_s)):
        if not value > 0.0:
            raise InvalidInput(f"{name}: {value}; a time above 0 is allowed")
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    half = cost_s / (2.0 * mtbf_s)
    return sqrt(2.0 * cost_s * mtbf_s) * (1.0 + sqrt(half) / 3.0 + half / 9.0) - cost_s


def uncovered_mtbf_s(node_mtbf_s: float, nodes: int, copies: int, window_s: float) -> float:
    """Return the mean time between losses that copies in memory do not cover, seconds.

    One of a task's nodes is lost ``nodes`` times as often as a single one. Each copy of the task's state is on one
    other node, which is lost within the window with probability ``window_s / node_mtbf_s`` (small, and independent).

    Args:
        node_mtbf_s: mean time between losses of one node.
        nodes: nodes of the task.
        copies: number of copies of each part of its state, beside the one that is used; 0: every loss reads the
            checkpoint.
        window_s: the time from a loss until all copies are made again.
    """
    mtbf_s = node_mtbf_s / max(1, nodes)
    for _ in range(copies):
        mtbf_s = mtbf_s * max(1.0, node_mtbf_s / window_s)
    return mtbf_s


def checkpoint_every_s(state: State, at: datetime, changes: Iterable[TaskChange] = ()) -> dict[str, float]:
    """Return the seconds to train between two checkpoints, on the grid of times, for each task that has workers.

    Args:
        state: the cluster.
        at: when the plan is made.
        changes: the plan's changes. Tasks count with the workers that they have once the changes are carried out.
    """
    mtbf_s = node_mtbf_s(state, at)
    changed = {change.task: _nodes(change) for change in changes}
    nodes = {
        name: changed[name] if name in changed else len(nodes_of(task.members))
        for name, task in sorted(state.tasks.items())
        if task.life == "active"
    }
    return {name: on_grid(_every_s(state, state.tasks[name], n, mtbf_s)) for name, n in nodes.items() if n}


def _nodes(change: TaskChange) -> int:
    """Return the number of the task's nodes once the change is carried out; 0 if it leaves."""
    stage = change.target or change.interrupted
    if stage is None or change.action not in ("move", "none"):
        return 0
    return len({member.node for member in stage.members})


def _every_s(state: State, task: Task, nodes: int, mtbf_s: float) -> float:
    cost_s = max(saving_s(state, task), LEAST_COST_S)
    return interval_s(cost_s, uncovered_mtbf_s(mtbf_s, nodes, _copies(task, nodes), recovery_s(state, task)))


LEAST_COST_S = 1e-3
"""Least cost of a checkpoint, seconds: the ranks have to agree on it."""


def _copies(task: Task, nodes: int) -> int:
    """Return the copies of each part of the state on other nodes: another replica, or a snapshot in memory."""
    replicas = task.layout.data if task.layout is not None else 1
    replicated = replicas > 1 and not task.spec.parallel.distributed_optimizer
    return 1 if nodes > 1 and (replicated or task.spec.checkpoint.in_memory) else 0
