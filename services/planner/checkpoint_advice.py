"""Advice on checkpoints: how long each task should train between two of them, from the measured rate of node losses.

The specification says how many steps there are between two checkpoints (``checkpoint.every``); a plan says how many
seconds would lose the least (``shared.planning.checkpoint_interval``).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from services.planner.placement.transition_costs import on_grid, recovery_s, saving_s
from services.planner.problem.problem import node_mtbf_s
from services.planner.state.cluster import State, Task
from services.planner.state.usable_nodes import nodes_of
from shared.events.plans import TaskChange
from shared.planning.checkpoint_interval import interval_s, uncovered_mtbf_s


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
