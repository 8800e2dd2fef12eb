"""What decisions need to know of all nodes, or of all nodes of a task, together.

The answers are found once for each set of nodes, or for the workers that a task keeps: most events leave both as they
are, and a cluster has thousands of nodes and workers. If one node is replaced (``replaced``), they follow from what was
known.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

from services.planner.state.cluster import Node, node_of

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

_MOST = 16
"""Number of sets of nodes that are remembered: the present one, and those of questions. A set of the workers of 2,048
nodes has about a megabyte."""


Value_co = TypeVar("Value_co", covariant=True)


class ObjectKey(Generic[Value_co]):
    """A value as a key: equal to the same object alone. The key keeps the value alive, so its id is no other's."""

    __slots__ = ("value",)

    def __init__(self, value: Value_co) -> None:
        """Take the value, which nobody changes."""
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self.value is other.value


@dataclass(frozen=True)
class UsableNodes:
    """The usable nodes. ``nodes``, ``workers``: the number for each kind that has a usable node.

    ``every``: all nodes. ``since_us``: the microseconds from the epoch to the time since which each node is usable, as
    the sum over all. ``closed``: the nodes that are closed to new work, in the order of the state.
    """

    every: Mapping[str, Node]
    nodes: Mapping[str, int]
    workers: Mapping[str, int]
    since_us: int
    closed: tuple[Node, ...]

    @cached_property
    def every_worker(self) -> frozenset[str]:
        """The workers of all usable nodes. Plans that place no task do not ask for them."""
        return frozenset[str]().union(*[node.workers for node in self.every.values() if node.usable])

    def usable_s(self, at: datetime) -> float:
        """Return how long the nodes have been usable at a time, seconds, all together.

        Times are whole microseconds, so the sum is exact and does not depend on the order of the nodes.
        """
        return (sum(self.nodes.values()) * _us(at) - self.since_us) / 10**6


def _us(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


_known: OrderedDict[ObjectKey[Mapping[str, Node]], UsableNodes] = OrderedDict()
"""What is known of each set of nodes; the set that was asked for last is at the end."""

_lock = threading.Lock()
"""The lock of ``_known``: another thread makes plans ahead."""


def usable_nodes(nodes: Mapping[str, Node]) -> UsableNodes:
    """Return what is known of the usable nodes."""
    found = _remembered(nodes)
    return found if found is not None else _remember(nodes, _found(nodes))


def _remembered(nodes: Mapping[str, Node]) -> UsableNodes | None:
    key = ObjectKey(nodes)
    with _lock:
        found = _known.get(key)
        if found is not None:
            _known.move_to_end(key)
        return found


def _remember(nodes: Mapping[str, Node], found: UsableNodes) -> UsableNodes:
    with _lock:
        _known[ObjectKey(nodes)] = found
        if len(_known) > _MOST:
            _known.popitem(last=False)
    return found


def _found(nodes: Mapping[str, Node]) -> UsableNodes:
    usable = [node for node in nodes.values() if node.usable]
    numbers: dict[str, int] = {}
    workers: dict[str, int] = {}
    for node in usable:
        _count(numbers, workers, node, 1)
    return UsableNodes(
        every=nodes,
        nodes=numbers,
        workers=workers,
        since_us=sum([node.since - _EPOCH for node in usable], timedelta()) // _MICROSECOND,
        closed=tuple(node for node in usable if not node.open),
    )


def _count(numbers: dict[str, int], workers: dict[str, int], node: Node, sign: int) -> None:
    """Add a node to the numbers, or take it from them; a kind without a node has no number."""
    kind = node.hardware
    numbers[kind] = numbers.get(kind, 0) + sign
    workers[kind] = workers.get(kind, 0) + sign * len(node.workers)
    if not numbers[kind]:
        del numbers[kind], workers[kind]


def replaced(nodes: Mapping[str, Node], node: Node) -> dict[str, Node]:
    """Return the nodes with one that is new, or takes the place of the one of its name."""
    before = nodes.get(node.name)
    after = {**nodes, node.name: node}
    known = _remembered(nodes)
    if known is not None:
        _remember(after, _with_replaced(known, after, before, node))
    return after


def _with_replaced(known: UsableNodes, after: Mapping[str, Node], before: Node | None, node: Node) -> UsableNodes:
    """Return what is known of the usable nodes once one was replaced. ``after``: all nodes."""
    numbers, workers = dict(known.nodes), dict(known.workers)
    since_us, closed = known.since_us, known.closed
    if before is not None and before.usable:
        _count(numbers, workers, before, -1)
        since_us -= _us(before.since)
    if node.usable:
        _count(numbers, workers, node, 1)
        since_us += _us(node.since)
    if closed or (node.usable and not node.open):
        closed = tuple(each for each in after.values() if each.usable and not each.open)
    return UsableNodes(after, numbers, workers, since_us, closed)


def closed_nodes(nodes: Mapping[str, Node]) -> tuple[Node, ...]:
    """Return the usable nodes that are closed to new work, in the order of the state."""
    return usable_nodes(nodes).closed


def usable_workers(nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return the workers of all usable nodes: those for which ``State.usable`` is true."""
    return usable_nodes(nodes).every_worker


def open_workers(nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return the workers of all nodes on which new work may be placed."""
    found = usable_nodes(nodes)
    if not found.closed:
        return found.every_worker  # not a copy: it may have thousands of workers
    return found.every_worker.difference(*[node.workers for node in found.closed])


def nodes_of(workers: tuple[str, ...]) -> frozenset[str]:
    """Return the nodes of a task's workers. The task keeps the tuple itself, so the answer is remembered by it."""
    return _nodes_of(ObjectKey(workers))


@lru_cache(maxsize=1024)  # each problem of the look-ahead asks for every task's nodes
def _nodes_of(workers: ObjectKey[tuple[str, ...]]) -> frozenset[str]:
    return frozenset(map(node_of, workers.value))
