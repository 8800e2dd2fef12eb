"""Counts to concrete workers, in rank order. Deterministic.

A rank has coordinates: tensor, data, pipeline, in Megatron's default order (``tp-dp-pp``), so that
rank = tp + t * dp + t * d * pp. Workers are placed by *cells* (one tensor-parallel group: t workers) that make up
replicas (p cells, one a pipeline stage), and are given ranks at the end. In this order of importance:

1. A cell is inside a node wherever a node has room for it; otherwise it crosses as few nodes as can be.
2. As few workers as possible move. Replicas that are whole stay; of broken ones the cells that are left stay at their
   stages. New members come last, so that the lowest ranks hold the state. (Where workers remain in any case, those that
   lost their process go first, then those on lemons, then those of which a node or a domain has most.)
3. A replica stays within one failure domain, consecutive stages on the same node or on nodes next to one another.
4. Nodes of few incidents are filled first: lemons are left as the spares.
5. Replicas go where the task has fewest, by node, then by domain.
6. Idle workers before those that another task gives up in the same plan: a process can start on them at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.planner.state import Node, node_of

Cell = tuple[str, ...]
"""The workers of one tensor-parallel group, in rank order."""


@dataclass(frozen=True, slots=True)
class Want:
    """A task that is placed on ``count`` workers, a multiple of ``tensor * pipeline``.

    ``keep``: usable workers it has, in the order in which they are to stay. ``holders``: those whose process lives.
    ``ranks``: its last members by rank, if their tensor and pipeline sizes were these; else empty.
    """

    name: str
    count: int
    tensor: int = 1
    pipeline: int = 1
    keep: Sequence[str] = ()
    holders: Collection[str] = frozenset()
    ranks: Sequence[str] = ()


class Placed(NamedTuple):
    """A task's workers in rank order. ``crossing``: how many of its tensor groups span nodes."""

    workers: list[str]
    crossing: int


def place(
    wants: Sequence[Want],
    nodes: Mapping[str, Node],
    free: Mapping[str, Sequence[str]],
    busy: Collection[str],
    incidents: Mapping[str, int] | None = None,
) -> dict[str, Placed]:
    """Return each task's workers.

    Args:
        wants: the tasks whose workers change; they fit into what is free.
        nodes: all nodes, for the domains.
        free: of each node, the workers that no other task keeps, including those of ``wants``.
        busy: those of them on which a process may still be.
        incidents: how often a node failed.
    """
    blamed = incidents or {}
    replicas = {want.name: _kept(want, nodes, blamed) for want in wants}
    reserved = {w for found in replicas.values() for replica in found for cell in replica if cell for w in cell}
    room = _Room(nodes, free, reserved, busy, blamed)
    placed = {}
    # Large groups first: small ones fit into what they leave.
    for want in sorted(wants, key=lambda w: (-w.tensor, -w.tensor * w.pipeline, w.name)):
        full = _fill(want, replicas[want.name], room)
        workers = [w for stage in range(want.pipeline) for replica in full for w in replica[stage]]
        crossing = 0
        if want.tensor > 1:
            crossing = sum(len({node_of(w) for w in cell}) > 1 for replica in full for cell in replica)
        placed[want.name] = Placed(workers, crossing)
    return placed


Replica = list[Cell | None]
"""The cells of a replica by pipeline stage; None: still to be found."""


def _kept(want: Want, nodes: Mapping[str, Node], incidents: Mapping[str, int]) -> list[Replica]:
    """Return the replicas the task is to have, with those cells that stay where they are."""
    old = _old_replicas(want)
    whole = [replica for replica in old if all(replica)]
    data = want.count // (want.tensor * want.pipeline)
    if len(whole) >= data:
        return _best(whole, data, want, nodes, incidents)
    broken = sorted((replica for replica in old if not all(replica)), key=lambda r: -sum(c is not None for c in r))
    bases, rest = broken[: data - len(whole)], broken[data - len(whole) :]
    _reuse(bases, rest)
    vacant: list[Replica] = [[None] * want.pipeline for _ in range(data - len(whole) - len(bases))]
    return [*whole, *bases, *vacant]


def _old_replicas(want: Want) -> list[Replica]:
    """Return the task's replicas as they were, without the cells that have lost a worker."""
    if want.tensor * want.pipeline == 1:
        return [[(worker,)] for worker in want.keep]
    usable = set(want.keep)
    data = len(want.ranks) // (want.tensor * want.pipeline)
    replicas: list[Replica] = []
    for d in range(data):
        starts = [want.tensor * (d + data * stage) for stage in range(want.pipeline)]
        cells = [tuple(want.ranks[start : start + want.tensor]) for start in starts]
        replicas.append([cell if usable.issuperset(cell) else None for cell in cells])
    return [replica for replica in replicas if any(replica)]


def _best(
    whole: list[Replica], data: int, want: Want, nodes: Mapping[str, Node], incidents: Mapping[str, int]
) -> list[Replica]:
    """Return ``data`` of the replicas, in their order."""
    if len(whole) == data:
        return whole
    holders = set(want.holders)
    on_node: dict[str, int] = {}
    in_domain: dict[str, int] = {}
    keys = []
    for index, replica in enumerate(whole):
        workers = [worker for cell in replica if cell for worker in cell]
        node = node_of(workers[0])
        domain = nodes[node].domain
        gone = sum(worker not in holders for worker in workers)
        failed = sum(incidents.get(name, 0) for name in {node_of(worker) for worker in workers})
        keys.append((gone, failed, on_node.get(node, 0), in_domain.get(domain, 0), index))
        on_node[node] = on_node.get(node, 0) + 1
        in_domain[domain] = in_domain.get(domain, 0) + 1
    return [whole[index] for index in sorted(key[-1] for key in sorted(keys)[:data])]


def _reuse(bases: list[Replica], rest: list[Replica]) -> None:
    """Move cells of ``rest`` to vacant places of ``bases``: to their own stage first, then to any."""
    spare = [(stage, cell) for replica in rest for stage, cell in enumerate(replica) if cell]
    for same_stage in (True, False):
        for replica in bases:
            for stage, cell in enumerate(replica):
                if cell is None:
                    found = next((item for item in spare if item[0] == stage or not same_stage), None)
                    if found is not None:
                        spare.remove(found)
                        replica[stage] = found[1]


def _fill(want: Want, replicas: list[Replica], room: _Room) -> list[list[Cell]]:
    """Return the replicas with all their cells; those taken are gone from the room."""
    if all(cell for replica in replicas for cell in replica):
        return [[cell for cell in replica if cell] for replica in replicas]
    chooser = _Chooser(want, replicas, room)
    # Broken replicas first: they are to be completed near what is left of them.
    for replica in sorted(replicas, key=lambda r: not any(r)):
        for stage in range(want.pipeline):
            if replica[stage] is None:
                replica[stage] = chooser.take(_neighbour(replica, stage))
    return [[cell for cell in replica if cell] for replica in replicas]


def _neighbour(replica: Replica, stage: int) -> str | None:
    """Return the node of the nearest stage that has a place; the one before, if two are as near."""
    near = sorted((abs(other - stage), other) for other, cell in enumerate(replica) if cell)
    for _, other in near:
        cell = replica[other]
        if cell:
            return node_of(cell[-1] if other < stage else cell[0])
    return None


class _Room:
    """The free workers of each node: idle ones, and busy ones on which a process may still be."""

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
        self.index = {name: i for i, name in enumerate(self.names)}
        self._nodes = nodes
        self.incidents = incidents

    def domain(self, node: str) -> str:
        """Return the failure domain of a node."""
        return self._nodes[node].domain

    def at(self, node: str) -> list[str]:
        """Return a node's free workers, idle ones first."""
        return [*self.idle.get(node, ()), *self.busy.get(node, ())]

    def remove(self, node: str, workers: Iterable[str]) -> None:
        """Take workers of a node away."""
        for worker in workers:
            where = self.idle if worker in self.idle.get(node, ()) else self.busy
            where[node].remove(worker)


_NodeKey = tuple[int, int, int, int, int, int]
"""Workers that move, incidents, room (negative), cells of the task, workers to wait for, index: least is best."""

_DomainKey = tuple[int, int, int, int, int, int, int, int, str]
"""The same of a domain's best node, with whether the domain lacks room for a replica (second) and its cells of the
task (sixth)."""


class _Chooser:
    """Finds the best node for one cell of a task after another.

    One heap of nodes for each domain and one of domains. Every part of a key only grows as workers are taken, and
    taking changes a single node and its domain: entries that no longer hold are dropped when they come up.
    """

    def __init__(self, want: Want, replicas: list[Replica], room: _Room) -> None:
        self._want, self._room = want, room
        self._own = self._loose(replicas)
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
        """Take the workers of a cell, next to ``neighbour`` if one is given."""
        node = self._best(neighbour)
        if node is None:
            return self._crossing()
        found = tuple(self._ordered(node)[: self._want.tensor])
        self._remove(node, found)
        self._count(node)
        self._refresh(node)
        return found

    def _loose(self, replicas: list[Replica]) -> dict[str, list[str]]:
        """Return the task's own workers that have no place in a cell yet, by node."""
        placed = {worker for replica in replicas for cell in replica if cell for worker in cell}
        free = {worker: None for worker in self._want.keep if worker not in placed}
        own: dict[str, list[str]] = {}
        for worker in free:
            if worker in self._room.at(node_of(worker)):
                own.setdefault(node_of(worker), []).append(worker)
        return own

    def _count(self, node: str) -> None:
        domain = self._room.domain(node)
        self._on_node[node] = self._on_node.get(node, 0) + 1
        self._in_domain[domain] = self._in_domain.get(domain, 0) + 1

    def _capacity(self, node: str) -> int:
        """Return how many cells the node has room for."""
        free = len(self._room.idle.get(node, ())) + len(self._room.busy.get(node, ()))
        return free // self._want.tensor

    def _key(self, node: str) -> _NodeKey | None:
        """Return how good the node is for a cell; None without room."""
        want, room = self._want, self._room
        capacity = self._capacity(node)
        if capacity == 0:
            return None
        own = self._own.get(node, ())
        idle = room.idle.get(node, ())
        ready = len(own) + (sum(worker not in own for worker in idle) if own else len(idle))
        return (
            want.tensor - min(want.tensor, len(own)),
            room.incidents.get(node, 0),
            -min(capacity, want.pipeline),
            self._on_node.get(node, 0),
            want.tensor - min(want.tensor, ready),
            room.index[node],
        )

    def _top(self, domain: str) -> tuple[_NodeKey, str] | None:
        """Return the best node of a domain."""
        heap = self._nodes.get(domain, [])
        while heap and self._keys.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _domain_key(self, domain: str) -> _DomainKey | None:
        top = self._top(domain)
        if top is None:
            return None
        moved, incidents, room, on_node, waits, index = top[0]
        cramped = int(self._cells[domain] < self._want.pipeline)
        return moved, cramped, incidents, room, on_node, self._in_domain.get(domain, 0), waits, index, domain

    def _best(self, neighbour: str | None) -> str | None:
        """Return the node for the next cell: least moved, then nearest to the neighbour, then the best."""
        while self._domains and self._domain_keys.get(self._domains[0][-1]) != self._domains[0]:
            heapq.heappop(self._domains)
        candidates: list[tuple[int, int, str]] = []
        if neighbour is not None:
            if neighbour in self._keys:
                candidates.append((self._keys[neighbour][0], 0, neighbour))
            near = self._top(self._room.domain(neighbour))
            if near is not None:
                candidates.append((near[0][0], 1, near[1]))
        if self._domains:
            top = self._top(self._domains[0][-1])
            if top is not None:
                candidates.append((top[0][0], 2, top[1]))
        return min(candidates)[2] if candidates else None

    def _ordered(self, node: str) -> list[str]:
        """Return a node's free workers: the task's own, idle ones, those to wait for."""
        own = self._own.get(node, [])
        return [*own, *(worker for worker in self._room.at(node) if worker not in own)]

    def _remove(self, node: str, workers: Collection[str]) -> None:
        self._room.remove(node, workers)
        if node in self._own:
            self._own[node] = [worker for worker in self._own[node] if worker not in workers]

    def _refresh(self, node: str) -> None:
        """Bring the keys of a node of which a cell was taken, and of its domain, up to date."""
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
        """Take a cell that no node has room for: over as few nodes as possible, in one domain if one has room."""
        by_domain: dict[str, list[str]] = {}
        for node in self._room.names:
            if self._room.at(node):
                by_domain.setdefault(self._room.domain(node), []).append(node)
        choices = [self._fewest(nodes) for _, nodes in sorted(by_domain.items())]
        within = [choice for choice in choices if sum(len(workers) for _, workers in choice) == self._want.tensor]
        best = min(within, key=len) if within else self._fewest([n for nodes in by_domain.values() for n in nodes])
        found = tuple(worker for _, workers in best for worker in workers)
        if len(found) < self._want.tensor:
            raise ValueError(f"task {self._want.name}: the workers that are free are fewer than it is to have")
        for node, workers in best:
            self._remove(node, workers)
        self._count(best[0][0])
        return found

    def _fewest(self, nodes: Iterable[str]) -> list[tuple[str, list[str]]]:
        """Return nodes with the workers of a cell: those with most of the task's own, then the fullest, first."""
        left = self._want.tensor
        found = []
        for node in sorted(nodes, key=lambda n: (-len(self._own.get(n, ())), -len(self._room.at(n)), n)):
            if left == 0:
                break
            workers = self._ordered(node)[:left]
            found.append((node, workers))
            left -= len(workers)
        return found
