"""Cells: the workers of one tensor-parallel group, and the choice of the best node for one cell after another.

``ranks.py`` states the order of importance that the choice follows.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.planner.state.cluster import Node, node_of

Cell = tuple[str, ...]
"""The workers of one tensor-parallel group, in rank order."""

Replica = list[Cell | None]
"""The cells of a data-parallel replica by pipeline stage; None: still to be found."""


class NoRoom(ValueError):
    """The workers that are free are fewer than a task is to have."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A task that is to be placed on ``count`` workers, a multiple of ``tensor * pipeline``.

    Attributes:
        name: name of the task.
        count: workers it is to have.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        keep: usable workers that the task has, in the order in which they are to stay.
        reserved: those of ``keep`` that no other task may get, on cordoned nodes; given up last.
        owners: workers whose process has the task's state.
        ranks: the task's last members by rank, if their tensor and pipeline sizes were the same; else empty.
        slow: slow workers that it may have, and no other task, with their slowdowns; taken last and given up first.
    """

    name: str
    count: int
    tensor: int = 1
    pipeline: int = 1
    keep: Sequence[str] = ()
    reserved: Collection[str] = frozenset()
    owners: Collection[str] = frozenset()
    ranks: Sequence[str] = ()
    slow: Mapping[str, float] = field(default_factory=dict)


class Room:
    """The free workers of each node: idle ones, and busy ones on which a process may still run."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        free: Mapping[str, Sequence[str]],
        reserved: Collection[str],
        busy: Collection[str],
        incidents: Mapping[str, int],
    ) -> None:
        self.idle: dict[str, list[str]] = {}
        self.busy: dict[str, list[str]] = {}
        for node in sorted(free):
            workers = [worker for worker in free[node] if worker not in reserved]
            if workers:
                self.idle[node] = [worker for worker in workers if worker not in busy]
                self.busy[node] = [worker for worker in workers if worker in busy]
        self.names = list(self.idle)
        self.position = {name: i for i, name in enumerate(self.names)}
        self._nodes = nodes
        self.incidents = incidents

    def domain(self, node: str) -> str:
        """Return the failure domain of a node."""
        return self._nodes[node].domain

    def at(self, node: str) -> list[str]:
        """Return the free workers of a node, idle ones first."""
        return [*self.idle.get(node, ()), *self.busy.get(node, ())]

    def free(self, node: str) -> int:
        """Return the number of free workers of a node."""
        return len(self.idle.get(node, ())) + len(self.busy.get(node, ()))

    def add(self, workers: Iterable[str], busy: Collection[str]) -> None:
        """Add workers that only the next task may have."""
        for worker in workers:
            node = node_of(worker)
            if node not in self.idle:
                self.idle[node], self.busy[node] = [], []
                self.position[node] = len(self.names)
                self.names.append(node)
            (self.busy if worker in busy else self.idle)[node].append(worker)

    def discard(self, workers: Iterable[str]) -> None:
        """Remove those of the added workers that were not taken."""
        for worker in workers:
            for where in (self.idle, self.busy):
                if worker in where[node_of(worker)]:
                    where[node_of(worker)].remove(worker)

    def remove(self, node: str, workers: Iterable[str]) -> None:
        """Remove workers of a node from the free ones."""
        for worker in workers:
            where = self.idle if worker in self.idle.get(node, ()) else self.busy
            where[node].remove(worker)


class _NodeKey(NamedTuple):
    """How well a node suits the next cell; the least key is the best.

    ``slow``: slow workers that the cell would have. ``moved``: workers that move. ``incidents``: of the node. ``room``:
    cells that fit, negative. ``cells``: of the task on the node. ``busy``: workers to wait for. ``position``: of the
    node.
    """

    slow: int
    moved: int
    incidents: int
    room: int
    cells: int
    busy: int
    position: int


class _DomainKey(NamedTuple):
    """The key of a domain's best node, with the domain's own numbers added.

    ``cramped``: 1 if the domain lacks room for a replica, else 0. ``in_domain``: cells of the task in the domain.
    """

    slow: int
    moved: int
    cramped: int
    incidents: int
    room: int
    cells: int
    in_domain: int
    busy: int
    position: int
    domain: str


class CellChooser:
    """Finds the best node for one cell of a task after another.

    There is one heap of nodes for each domain, and one heap of domains. Every part of a key only grows as workers are
    taken, and each cell changes a single node and its domain. Outdated entries are dropped when they reach the top.
    """

    def __init__(self, request: PlacementRequest, replicas: list[Replica], room: Room) -> None:
        self._request, self._room = request, room
        self._own = self._loose(replicas)
        self._free: _FreeNodes | None = None
        self._on_node: dict[str, int] = {}
        self._in_domain: dict[str, int] = {}
        for cell in (cell for replica in replicas for cell in replica if cell):
            self._count(node_of(cell[0]))
        self._cells: dict[str, int] = {}
        self._keys: dict[str, _NodeKey] = {}
        self._nodes: dict[str, list[tuple[_NodeKey, str]]] = {}
        for node in room.names:
            key = self._key(node)
            if key is not None:
                self._keys[node] = key
                domain = room.domain(node)
                self._nodes.setdefault(domain, []).append((key, node))
                self._cells[domain] = self._cells.get(domain, 0) + self._capacity(node)
        for heap in self._nodes.values():
            heapq.heapify(heap)
        self._domain_keys = {d: found for d in self._nodes if (found := self._domain_key(d)) is not None}
        self._domains = sorted(self._domain_keys.values())

    def take(self, neighbour: str | None) -> Cell:
        """Take the workers of a cell, next to the node ``neighbour`` if it is given."""
        node = self._best(neighbour)
        if node is None:
            return self._crossing()
        found = tuple(self._ordered(node)[: self._request.tensor])
        self._remove(node, found)
        self._count(node)
        self._refresh(node)
        return found

    def _loose(self, replicas: list[Replica]) -> dict[str, list[str]]:
        """Return the task's own workers that are in no cell yet, by node."""
        placed = {worker for replica in replicas for cell in replica if cell for worker in cell}
        free = {worker: None for worker in self._request.keep if worker not in placed}
        own: dict[str, list[str]] = {}
        for worker in free:
            if worker in self._room.at(node_of(worker)):
                own.setdefault(node_of(worker), []).append(worker)
        return own

    def _count(self, node: str) -> None:
        """Count one more cell of the task on the node."""
        domain = self._room.domain(node)
        self._on_node[node] = self._on_node.get(node, 0) + 1
        self._in_domain[domain] = self._in_domain.get(domain, 0) + 1

    def _capacity(self, node: str) -> int:
        """Return the number of cells for which the node has room."""
        return self._room.free(node) // self._request.tensor

    def _key(self, node: str) -> _NodeKey | None:
        """Return how well the node suits a cell; None if it has no room."""
        request, room = self._request, self._room
        capacity = self._capacity(node)
        if capacity == 0:
            return None
        own = self._own.get(node, ())
        idle = room.idle.get(node, ())
        ready = len(own) + (sum(worker not in own for worker in idle) if own else len(idle))
        slow = 0
        if request.slow:
            slow = sum(worker in request.slow for worker in self._ordered(node)[: request.tensor])
        return _NodeKey(
            slow=slow,
            moved=request.tensor - min(request.tensor, len(own)),
            incidents=room.incidents.get(node, 0),
            room=-min(capacity, request.pipeline),
            cells=self._on_node.get(node, 0),
            busy=request.tensor - min(request.tensor, ready),
            position=room.position[node],
        )

    def _top(self, domain: str) -> tuple[_NodeKey, str] | None:
        """Return the key and the name of the best node of a domain; None if none has room."""
        heap = self._nodes.get(domain, [])
        while heap and self._keys.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _domain_key(self, domain: str) -> _DomainKey | None:
        """Return how well the domain suits a cell; None if none of its nodes has room."""
        top = self._top(domain)
        if top is None:
            return None
        key = top[0]
        return _DomainKey(
            slow=key.slow,
            moved=key.moved,
            cramped=int(self._cells[domain] < self._request.pipeline),
            incidents=key.incidents,
            room=key.room,
            cells=key.cells,
            in_domain=self._in_domain.get(domain, 0),
            busy=key.busy,
            position=key.position,
            domain=domain,
        )

    def _best(self, neighbour: str | None) -> str | None:
        """Return the node for the next cell: fewest workers moved, then nearest to the neighbour, then the best."""
        while self._domains and self._domain_keys.get(self._domains[0].domain) != self._domains[0]:
            heapq.heappop(self._domains)
        candidates: list[tuple[int, int, int, str]] = []
        if neighbour is not None:
            if neighbour in self._keys:
                key = self._keys[neighbour]
                candidates.append((key.slow, key.moved, 0, neighbour))
            near = self._top(self._room.domain(neighbour))
            if near is not None:
                candidates.append((near[0].slow, near[0].moved, 1, near[1]))
        if self._domains:
            top = self._top(self._domains[0].domain)
            if top is not None:
                candidates.append((top[0].slow, top[0].moved, 2, top[1]))
        return min(candidates)[3] if candidates else None

    def _ordered(self, node: str) -> list[str]:
        """Return the free workers of a node: the task's own, then idle ones, then busy ones; slow ones last of all."""
        own = self._own.get(node, [])
        found = [*own, *(worker for worker in self._room.at(node) if worker not in own)]
        return sorted(found, key=self._request.slow.__contains__) if self._request.slow else found

    def _remove(self, node: str, workers: Collection[str]) -> None:
        """Remove workers of a node from the room and from the task's own."""
        self._room.remove(node, workers)
        if node in self._own:
            self._own[node] = [worker for worker in self._own[node] if worker not in workers]
        if self._free is not None:
            self._free.taken(node, len(workers))

    def _refresh(self, node: str) -> None:
        """Update the keys of a node and its domain after a cell was taken there."""
        domain = self._room.domain(node)
        self._cells[domain] -= 1
        self._keys.pop(node)
        key = self._key(node)
        if key is not None:
            self._keys[node] = key
            heapq.heappush(self._nodes[domain], (key, node))
        self._domain_keys.pop(domain, None)
        domain_key = self._domain_key(domain)
        if domain_key is not None:
            self._domain_keys[domain] = domain_key
            heapq.heappush(self._domains, domain_key)

    def _crossing(self) -> Cell:
        """Take a cell that fits in no node: over as few nodes as possible, in one domain if one has room."""
        if self._free is None:
            self._free = _FreeNodes(self._room, self._own)
        tensor = self._request.tensor
        within = [self._fewest(nodes) for nodes in self._free.of_domains(tensor)]
        best = min(within, key=len) if within else self._fewest(self._free)
        found = tuple(worker for _, workers in best for worker in workers)
        if len(found) < tensor:
            raise NoRoom(f"task {self._request.name}: the workers that are free are fewer than it is to have")
        for node, workers in best:
            self._remove(node, workers)
        self._count(best[0][0])
        return found

    def _fewest(self, nodes: Iterable[str]) -> list[tuple[str, list[str]]]:
        """Return the first of some nodes with the workers of a cell."""
        left = self._request.tensor
        found = []
        for node in nodes:
            if left == 0:
                break
            workers = self._ordered(node)[:left]
            found.append((node, workers))
            left -= len(workers)
        return found


class _FreeNodes:
    """The nodes that have free workers: those with most of the task's own, then those with most free ones, first.

    A large cluster has thousands of them, and a task may take hundreds of cells: each changes the place of few nodes.
    """

    def __init__(self, room: Room, own: Mapping[str, Sequence[str]]) -> None:
        self._room, self._own = room, own
        self._keys = {node: self._key(node) for node in room.names if room.free(node)}
        self._order = sorted(self._keys.values())
        self._domains: dict[str, list[str]] = {}
        self._in_domain: dict[str, int] = {}
        for node in self._keys:
            domain = room.domain(node)
            self._domains.setdefault(domain, []).append(node)
            self._in_domain[domain] = self._in_domain.get(domain, 0) + room.free(node)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the nodes in their order."""
        return (node for _, _, node in self._order)

    def of_domains(self, least: int) -> list[list[str]]:
        """Return the nodes, in their order, of each domain with at least so many free workers."""
        roomy = sorted(domain for domain, free in self._in_domain.items() if free >= least)
        found = [sorted(self._keys[node] for node in self._domains[domain] if node in self._keys) for domain in roomy]
        return [[node for _, _, node in keys] for keys in found]

    def taken(self, node: str, count: int) -> None:
        """Put a node in its place after so many of its workers were taken."""
        self._in_domain[self._room.domain(node)] -= count
        del self._order[bisect_left(self._order, self._keys.pop(node))]
        if self._room.free(node):
            self._keys[node] = self._key(node)
            insort(self._order, self._keys[node])

    def _key(self, node: str) -> tuple[int, int, str]:
        return -len(self._own.get(node, ())), -self._room.free(node), node
