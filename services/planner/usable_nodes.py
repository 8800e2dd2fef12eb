"""What decisions need to know of all nodes, or of all nodes of a task, together.

It is found once for each set of nodes, or for the workers that a task keeps: most events leave both as they are, and a
cluster has thousands of nodes and workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

from services.planner.object_keys import ObjectKey
from services.planner.state import Node, node_of

_MICROSECOND = timedelta(microseconds=1)


class UsableNodes(NamedTuple):
    """The usable nodes. ``nodes``, ``workers``: how many there are of each kind.

    ``since``: a time, from which ``later_us`` counts: the microseconds from there to the time since which each node is
    usable, of all together.
    """

    nodes: Mapping[str, int]
    workers: Mapping[str, int]
    since: datetime | None
    later_us: int

    def usable_s(self, at: datetime) -> float:
        """Return how long the nodes have been usable at a time, seconds, all together.

        Times are whole microseconds, so the sum is exact and does not depend on the order of the nodes.
        """
        if self.since is None:
            return 0.0
        number = sum(self.nodes.values())
        return (number * ((at - self.since) // _MICROSECOND) - self.later_us) / 10**6


def usable_nodes(nodes: Mapping[str, Node]) -> UsableNodes:
    """Return what there is of usable nodes."""
    return _counted(ObjectKey(nodes))


@lru_cache(maxsize=16)
def _counted(nodes: ObjectKey[Mapping[str, Node]]) -> UsableNodes:
    usable = [node for node in nodes.value.values() if node.usable]
    workers: dict[str, int] = {}
    for node in usable:
        workers[node.hardware] = workers.get(node.hardware, 0) + len(node.workers)
    since = usable[0].since if usable else None
    later_us = sum((node.since - since) // _MICROSECOND for node in usable) if since is not None else 0
    return UsableNodes(Counter(node.hardware for node in usable), workers, since, later_us)


def usable_workers(nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return the workers of all usable nodes: those for which ``State.usable`` is true."""
    return _workers(ObjectKey(nodes)).usable


def open_workers(nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return the workers of all nodes on which new work may be placed."""
    return _workers(ObjectKey(nodes)).open


class _Workers(NamedTuple):
    usable: frozenset[str]
    open: frozenset[str]


@lru_cache(maxsize=4)  # a set of the workers of 2,048 nodes has about a megabyte
def _workers(nodes: ObjectKey[Mapping[str, Node]]) -> _Workers:
    usable = [node for node in nodes.value.values() if node.usable]
    closed = [node for node in usable if not node.open]
    found = frozenset[str]().union(*(node.workers for node in usable))
    return _Workers(found, found.difference(*(node.workers for node in closed)) if closed else found)


def nodes_of(workers: tuple[str, ...]) -> frozenset[str]:
    """Return the nodes of a task's workers. The tuple is one that the task keeps: its answer is remembered."""
    return _nodes_of(ObjectKey(workers))


@lru_cache(maxsize=1024)  # the members and the occupied workers of some hundred tasks
def _nodes_of(workers: ObjectKey[tuple[str, ...]]) -> frozenset[str]:
    return frozenset(map(node_of, workers.value))
