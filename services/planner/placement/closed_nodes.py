"""Nodes that are closed to new work: cordoned ones, whose workers stay with their tasks, and draining ones. Pure.

The solver knows counts, not nodes. The workers of a draining node are in no problem, and a task that has some of them
counts as faulted: it is disturbed whatever its count. A worker of a cordoned node is in the problem as long as a task
has it, and placement gives it to no other task.
"""

from __future__ import annotations

from services.planner.placement.changes import can_save, keeps_state
from services.planner.state.cluster import State, Task, node_of
from services.planner.state.usable_nodes import closed_nodes


def closed_workers(state: State) -> set[str]:
    """Return the workers that no plan may use: those of closed nodes, except cordoned workers that a task has."""
    closed = closed_nodes(state.nodes)
    if not closed:
        return set()
    members = {worker for task in state.tasks.values() for worker in task.members}
    return {worker for node in closed for worker in node.workers if node.draining or worker not in members}


def reserved_workers(state: State, task: Task) -> list[str]:
    """Return the task's workers on cordoned nodes, which only this task may go on using, in rank order."""
    nodes = state.nodes
    if not closed_nodes(nodes):
        return []
    return [w for w in task.members if state.usable(w) and nodes[node_of(w)].cordoned and not is_draining(state, w)]


def is_draining(state: State, worker: str) -> bool:
    """Return whether the worker's node is being drained."""
    node = state.nodes.get(node_of(worker))
    return node is not None and node.usable and node.draining


def draining_members(state: State, task: Task) -> list[str]:
    """Return the task's workers on draining nodes, in rank order."""
    draining = {node.name for node in closed_nodes(state.nodes) if node.draining}
    return [worker for worker in task.members if node_of(worker) in draining] if draining else []


def without_cordons(state: State) -> State:
    """Return the state in which tasks have to leave cordoned nodes as well."""
    nodes = {name: node.model_copy(update={"draining": not node.open}) for name, node in state.nodes.items()}
    return state.model_copy(update={"nodes": nodes})


def has_processes(task: Task, node: str) -> bool:
    """Return whether the task may have a process on the node."""
    return any(node_of(worker) == node for worker in (*task.occupied, *task.live_owners, *task.members))


def has_to_save(state: State, task: Task) -> bool:
    """Return whether the task can save its state and cannot move it: the workers that stay lack a part of it.

    Members of a target stage take state from one another, and a process on a draining node is no member.
    """
    staying = {worker for worker in task.live_owners if not is_draining(state, worker)}
    return can_save(task) and not keeps_state(task, staying)
