"""Nodes in the fold of the log: how they join, leave, are lost, closed and returned; which processes go with them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import chain
from typing import Any

from services.planner.state.blame import blamed_node
from services.planner.state.cluster import Node, State, node_of, without
from services.planner.state.slow_workers import forget_slowness
from services.planner.state.usable_nodes import nodes_of, replaced
from shared.events.severities import ErrorKind, Severity
from shared.events.union import (
    ErrorDetected,
    FaultInjected,
    NodeAdopted,
    NodeCordoned,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeReturned,
)

INJECTED_S = 600.0
"""How long after a fault that a user asked for the loss of its node counts as the fault's. A hang is found within
minutes, and failed restarts escalate to the node within ``restart_window_s``, which is minutes too."""


def join_node(state: State, event: NodeJoined, at: datetime) -> State:
    """Return the state after a node has joined. A new incarnation of a usable node has lost all its processes."""
    old = state.nodes.get(event.node)
    if old is not None and old.usable and old.incarnation == event.incarnation:
        return state
    if old is not None and old.usable:
        state = lose_workers(_with_usable_time(state, old, at), old.workers)
    node = Node(
        name=event.node,
        incarnation=event.incarnation,
        domain=event.domain,
        workers=tuple(event.workers),
        usable=True,
        since=at,
        hardware=event.hardware,
        cordoned=old is not None and old.cordoned,
    )
    for task in state.tasks.values():
        if node.name in nodes_of(task.occupied):
            elsewhere = tuple(worker for worker in task.occupied if node_of(worker) != node.name)
            state = state.with_changed(task.name, occupied=elsewhere)
    state = forget_slowness(state, node.workers if old is None else (*old.workers, *node.workers))
    nodes = replaced(state.nodes, node)
    return state.model_copy(update={"nodes": nodes, "kinds": _counted(state.kinds, old, node)})


def adopt_node(state: State, event: NodeAdopted, at: datetime) -> State:
    """Return the state after a node has got another agent. Its processes stay, and so does all that they train."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.predecessor:
        return state
    return _with_node(state, node, incarnation=event.incarnation)


def _counted(kinds: dict[str, dict[int, int]], old: Node | None, new: Node) -> dict[str, dict[int, int]]:
    """Return ``State.kinds`` with a node in place of its earlier incarnation."""
    kinds = {kind: dict(sizes) for kind, sizes in kinds.items()}
    for node, change in ((old, -1), (new, 1)):
        if node is not None:
            sizes = kinds.setdefault(node.hardware, {})
            sizes[len(node.workers)] = sizes.get(len(node.workers), 0) + change
    return {kind: {k: n for k, n in sizes.items() if n} for kind, sizes in kinds.items() if any(sizes.values())}


def lose_node(state: State, name: str, event: ErrorDetected, at: datetime) -> State:
    """Return the state after a usable node was lost or isolated because of an error."""
    node = state.nodes.get(name)
    if node is None:
        return state
    away = node.away or (event.kind is ErrorKind.NODE_LOST and event.escalates is None)
    if not node.usable:
        return _with_node(state, node, away=away)
    state = _with_usable_time(state, node, at)
    reason = f"{event.kind.value} ({event.incident})"
    state = _with_node(state, node, usable=False, since=at, reason=reason, away=away)
    state = state.model_copy(update={"losses": state.losses + (not _is_injected(state, name, at))})
    return lose_workers(forget_slowness(state, node.workers), node.workers)


def note_injected(state: State, event: FaultInjected, at: datetime) -> State:
    """Return the state after a user asked for a fault: its cost says nothing about the node."""
    name = event.node
    if name is None and event.task in state.tasks and event.rank is not None:
        members = state.tasks[event.task].members
        name = node_of(members[event.rank]) if event.rank < len(members) else None
    return state if name is None else state.model_copy(update={"injected": {**state.injected, name: at}})


def _is_injected(state: State, name: str, at: datetime) -> bool:
    """Return whether a loss of the node now follows from a fault that a user asked for."""
    asked_at = state.injected.get(name)
    return asked_at is not None and (at - asked_at).total_seconds() <= INJECTED_S


def leave_node(state: State, event: NodeLeft, at: datetime) -> State:
    """Return the state after a node has left in order. That is no failure: the estimate of failures does not change."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return state
    if node.usable:
        state = _with_usable_time(state, node, at)
    reason = f"left: {event.reason}"
    state = _with_node(state, node, usable=False, since=at, reason=reason, away=True)
    return lose_workers(forget_slowness(state, node.workers), node.workers)


def cordon_node(state: State, event: NodeCordoned, at: datetime) -> State:
    """Return the state after a user wanted no new work on a node."""
    node = state.nodes.get(event.node)
    return state if node is None else _with_node(state, node, cordoned=True)


def drain_node(state: State, event: NodeDraining, at: datetime) -> State:
    """Return the state after a node began to be drained. A user's drain is a cordon too."""
    node = state.nodes.get(event.node)
    if node is None:
        return state
    return _with_node(state, node, draining=True, cordoned=node.cordoned or event.by == "user")


def return_node(state: State, event: NodeReturned, at: datetime) -> State:
    """Return the state after a node was returned. An isolated node is usable again; a node that is away has to join."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation:
        return state
    state = _with_node(state, node, cordoned=False, draining=False)
    if node.usable or node.away:
        return state
    return _with_node(state, state.nodes[node.name], usable=True, since=at, reason="")


def lose_workers(state: State, workers: Iterable[str], name: str | None = None) -> State:
    """Return the state after processes were lost. ``name``: the only task that loses them; None: every task."""
    gone = set(workers)
    nodes = set(map(node_of, gone))
    named = (state.tasks[name],) if name in state.tasks else ()
    for task in named if name is not None else state.tasks.values():
        if nodes.isdisjoint(nodes_of(task.members)) and nodes.isdisjoint(nodes_of(task.owners)):
            continue  # almost all tasks lose nothing
        there = [[worker for worker in known if worker in gone] for known in (task.owners, task.members)]
        hit = tuple(dict.fromkeys(chain.from_iterable(there)))
        if hit and task.life != "ended":
            state = state.with_changed(task.name, lost=(*task.lost, *without(hit, task.lost)), broken=True)
    return state


def count_incident(state: State, event: ErrorDetected) -> State:
    """Return the state with one more incident of the node that the error names.

    SEV3 does not count. An escalation to SEV1 does not count either: the SEV2 that it comes from has been counted. A
    difference between a task's processes is not the node's fault.
    """
    name = blamed_node(event)
    counted = event.severity is Severity.SEV1 and event.escalates is not None
    of_task = event.kind is ErrorKind.DIFFERENCE
    if name is None or event.severity is Severity.SEV3 or counted or of_task:
        return state
    return state.model_copy(update={"incidents": {**state.incidents, name: state.incidents.get(name, 0) + 1}})


def _with_node(state: State, node: Node, **changes: Any) -> State:
    """Return the state with these attributes of a node changed."""
    return state.model_copy(update={"nodes": replaced(state.nodes, node.model_copy(update=changes))})


def _with_usable_time(state: State, node: Node, at: datetime) -> State:
    """Return the state with the time added for which the node has been usable."""
    return state.model_copy(update={"node_s": state.node_s + (at - node.since).total_seconds()})
