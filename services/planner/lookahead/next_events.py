"""The events that may come next, for the look-ahead: losses of nodes, joins, ends and failures of tasks.

Nodes whose loss poses the same problem are a class: nodes of one kind and size on which each task has equally much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from services.planner.state.cluster import Node, State, Task, node_of
from shared.events.severities import SEVERITY, ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, NodeJoined, TaskFinished

EVENT_ID = "look-ahead"
"""The id, or part of an id, of events that have not happened."""


class TaskShare(NamedTuple):
    """A task's part of a node: the task's workers there, those that own its state, and those planned for it."""

    task: str
    workers: int
    owners: int
    members: int


class NodeClass(NamedTuple):
    """Usable nodes of one kind and size on which the same tasks have equal shares. ``node``: one of the nodes.

    ``cordoned``, ``draining``: whether the nodes are closed to new work.
    """

    node: str
    hardware: str
    workers: int
    cordoned: bool
    draining: bool
    shares: tuple[TaskShare, ...]


class NodeClasses:
    """Finds node classes. The shares of a task are remembered as long as the task is the same object."""

    def __init__(self) -> None:
        """Start without remembered shares."""
        self._known: dict[int, tuple[Task, dict[str, TaskShare]]] = {}

    def of(self, state: State) -> list[NodeClass]:
        """Return the classes of the usable nodes, in the order of their first node's name."""
        shares: dict[str, list[TaskShare]] = {name: [] for name, node in state.nodes.items() if node.usable}
        for name in sorted(state.tasks):
            if state.tasks[name].life != "ended":
                for node_name, share in self._shares(state.tasks[name]).items():
                    if node_name in shares:
                        shares[node_name].append(share)
        classes: dict[tuple[str, int, bool, bool, tuple[TaskShare, ...]], NodeClass] = {}
        for name in sorted(shares):
            node = state.nodes[name]
            key = (node.hardware, len(node.workers), node.cordoned, node.draining, tuple(shares[name]))
            if key not in classes:
                classes[key] = NodeClass(name, *key)
        return list(classes.values())

    def _shares(self, task: Task) -> dict[str, TaskShare]:
        found = self._known.get(id(task))
        if found is None:
            owners = Counter(map(node_of, task.live_owners))
            members = Counter(map(node_of, task.members))
            workers = Counter(map(node_of, dict.fromkeys((*task.owners, *task.members))))
            shares = {node: TaskShare(task.name, n, owners[node], members[node]) for node, n in workers.items()}
            found = self._known[id(task)] = task, shares
        return found[1]


def node_loss(node: str, at: datetime) -> ErrorDetected:
    """Return the loss of a node."""
    return ErrorDetected(
        event_id=EVENT_ID,
        occurred_at=at,
        incident=EVENT_ID,
        kind=ErrorKind.NODE_LOST,
        severity=SEVERITY[ErrorKind.NODE_LOST],
        method=Method.NODE_HEALTH,
        detected_at=at,
        node=node,
    )


def node_joins(state: State, at: datetime) -> Iterator[NodeJoined]:
    """Yield the return of each kind and size of lost node, and a new node of each kind and size in the cluster."""
    seen: set[tuple[str, int]] = set()
    for node in sorted(state.nodes.values(), key=lambda n: (n.usable, n.name)):
        kind = node.hardware, len(node.workers)
        if kind not in seen and not (node.cordoned and not node.usable):
            seen.add(kind)
            yield node_join(node.model_copy(update={"name": f"{node.name}+"}) if node.usable else node, at)


def node_join(node: Node, at: datetime) -> NodeJoined:
    """Return the join of a new incarnation of the node."""
    return NodeJoined(
        event_id=EVENT_ID,
        occurred_at=at,
        node=node.name,
        incarnation=EVENT_ID,
        agent_pid=1,
        domain=node.domain,
        hardware=node.hardware,
        workers=[f"{node.name}/{worker.rpartition('/')[2]}" for worker in node.workers],
    )


def task_ends(state: State, at: datetime) -> Iterator[TaskFinished]:
    """Yield the end of each task. Its workers become free whichever way it ends."""
    for name in sorted(state.tasks):
        task = state.tasks[name]
        if task.life != "ended":
            yield TaskFinished(
                event_id=EVENT_ID,
                occurred_at=at,
                task=name,
                generation=task.generation,
                step=task.spec.steps,
                samples_sha256="",
                parameters_path="",
            )


def task_failures(state: State, at: datetime) -> Iterator[ErrorDetected]:
    """Yield the failure of each running task for which no node is to blame: all its workers begin anew."""
    for name in sorted(state.tasks):
        if state.tasks[name].members:
            yield ErrorDetected(
                event_id=EVENT_ID,
                occurred_at=at,
                incident=EVENT_ID,
                kind=ErrorKind.COLLECTIVE_TIMEOUT,
                severity=Severity.SEV1,
                method=Method.STATISTICS,
                detected_at=at,
                task=name,
            )
