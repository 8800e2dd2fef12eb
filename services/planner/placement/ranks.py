"""Placement: worker counts become workers, in rank order. Deterministic.

A rank has coordinates tensor, data, pipeline, in Megatron's default order (``tp-dp-pp``):
rank = tp + t * dp + t * d * pp. Workers are placed as *cells* (one tensor-parallel group, t workers), which make up
replicas (p cells, one for each pipeline stage); ranks follow at the end. In this order of importance:

1. A cell is inside a node wherever a node has room for it. Otherwise it crosses as few nodes as possible.
2. As few workers as possible move. Whole replicas stay. The remaining cells of broken replicas stay at their stages.
   New members come last, so that the lowest ranks have the state. A task that shrinks first gives up workers that
   lost their process, then those that others can use (not on cordoned nodes), then those on lemons (nodes of many
   incidents), then those of the node or domain of which it has most.
   Before all of these come its slow workers, which hold it up.
3. A replica stays within one failure domain, and consecutive stages on the same node or on neighbouring nodes.
   A slow worker that the task may have is taken last.
4. Nodes of few incidents are filled first, so that lemons remain as spares.
5. Replicas go where the task has fewest, by node, then by domain.
6. Idle workers come before workers that another task gives up in the same plan, because a process can start on an
   idle worker at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

from services.planner.placement.cells import Cell, CellChooser, PlacementRequest, Replica, Room
from services.planner.state.cluster import Node, node_of


class Placed(NamedTuple):
    """A task's workers in rank order. ``crossing``: the number of its tensor groups that span nodes."""

    workers: list[str]
    crossing: int


def place(
    requests: Sequence[PlacementRequest],
    nodes: Mapping[str, Node],
    free: Mapping[str, Sequence[str]],
    busy: Collection[str],
    incidents: Mapping[str, int] | None = None,
) -> dict[str, Placed]:
    """Return the workers of each task.

    Args:
        requests: the tasks whose workers change. They fit into the free workers.
        nodes: all nodes, for their domains.
        free: by node, the workers that no other task keeps, including those of the tasks in ``requests``.
        busy: workers on which a process may still run.
        incidents: number of failures of each node.
    """
    blamed = incidents or {}
    replicas = {request.name: _kept(request, nodes, blamed) for request in requests}
    reserved = {w for found in replicas.values() for replica in found for cell in replica if cell for w in cell}
    room = Room(nodes, free, reserved, busy, blamed)
    placed = {}
    # Large groups first: small groups fit into the room that large ones leave.
    for request in sorted(requests, key=lambda w: (-w.tensor, -w.tensor * w.pipeline, w.name)):
        slow = [worker for worker in request.slow if worker not in reserved]
        room.add(slow, busy)
        full = _fill(request, replicas[request.name], room)
        room.discard(slow)
        workers = [w for stage in range(request.pipeline) for replica in full for w in replica[stage]]
        crossing = 0
        if request.tensor > 1:
            crossing = sum(len({node_of(w) for w in cell}) > 1 for replica in full for cell in replica)
        placed[request.name] = Placed(workers, crossing)
    return placed


def _kept(request: PlacementRequest, nodes: Mapping[str, Node], incidents: Mapping[str, int]) -> list[Replica]:
    """Return the replicas that the task is to have, with the cells that stay where they are."""
    old = _old_replicas(request)
    whole = [replica for replica in old if all(replica)]
    data = request.count // (request.tensor * request.pipeline)
    if len(whole) >= data:
        return _best(whole, data, request, nodes, incidents)
    broken = sorted((replica for replica in old if not all(replica)), key=lambda r: -sum(c is not None for c in r))
    bases, rest = broken[: data - len(whole)], broken[data - len(whole) :]
    _reuse(bases, rest)
    vacant: list[Replica] = [[None] * request.pipeline for _ in range(data - len(whole) - len(bases))]
    return [*whole, *bases, *vacant]


def _old_replicas(request: PlacementRequest) -> list[Replica]:
    """Return the task's replicas as they were, without the cells that have lost a worker."""
    if request.tensor * request.pipeline == 1:
        return [[(worker,)] for worker in request.keep]
    usable = set(request.keep)
    data = len(request.ranks) // (request.tensor * request.pipeline)
    replicas: list[Replica] = []
    for d in range(data):
        starts = [request.tensor * (d + data * stage) for stage in range(request.pipeline)]
        cells = [tuple(request.ranks[start : start + request.tensor]) for start in starts]
        replicas.append([cell if usable.issuperset(cell) else None for cell in cells])
    return [replica for replica in replicas if any(replica)]


def _best(
    whole: list[Replica], data: int, request: PlacementRequest, nodes: Mapping[str, Node], incidents: Mapping[str, int]
) -> list[Replica]:
    """Return ``data`` of the replicas that are whole, in their order."""
    if len(whole) == data:
        return whole
    owners, reserved = set(request.owners), set(request.reserved)
    on_node: dict[str, int] = {}
    in_domain: dict[str, int] = {}
    keys = []
    for index, replica in enumerate(whole):
        workers = [worker for cell in replica if cell for worker in cell]
        node = node_of(workers[0])
        domain = nodes[node].domain
        without_state = sum(worker not in owners for worker in workers)
        failed = sum(incidents.get(name, 0) for name in {node_of(worker) for worker in workers})
        slowdown = max((request.slow.get(worker, 1.0) for worker in workers), default=1.0)
        for_all = reserved.isdisjoint(workers)
        keys.append((slowdown, without_state, for_all, failed, on_node.get(node, 0), in_domain.get(domain, 0), index))
        on_node[node] = on_node.get(node, 0) + 1
        in_domain[domain] = in_domain.get(domain, 0) + 1
    return [whole[index] for index in sorted(key[-1] for key in sorted(keys)[:data])]


def _reuse(bases: list[Replica], rest: list[Replica]) -> None:
    """Move cells of ``rest`` to vacant places of ``bases``: first to their own stage, then to any."""
    spare = [(stage, cell) for replica in rest for stage, cell in enumerate(replica) if cell]
    for same_stage in (True, False):
        for replica, stage in _vacant(bases):
            found = next((item for item in spare if item[0] == stage or not same_stage), None)
            if found is not None:
                spare.remove(found)
                replica[stage] = found[1]


def _vacant(replicas: list[Replica]) -> list[tuple[Replica, int]]:
    """Return the places without a cell: replica and stage."""
    return [(replica, stage) for replica in replicas for stage, cell in enumerate(replica) if cell is None]


def _fill(request: PlacementRequest, replicas: list[Replica], room: Room) -> list[list[Cell]]:
    """Return the replicas with all their cells. New cells are taken from the room."""
    if all(map(all, replicas)):
        return cast(list[list[Cell]], replicas)
    chooser = CellChooser(request, replicas, room)
    # Broken replicas first: they are completed near their remaining cells.
    for replica in sorted(replicas, key=lambda r: not any(r)):
        for stage in range(request.pipeline):
            if replica[stage] is None:
                replica[stage] = chooser.take(_neighbour(replica, stage))
    return cast(list[list[Cell]], replicas)  # no place is left without a cell


def _neighbour(replica: Replica, stage: int) -> str | None:
    """Return the node of the nearest stage that has a cell; of two equally near ones, that of the earlier stage."""
    near = sorted((abs(other - stage), other) for other, cell in enumerate(replica) if cell)
    for _, other in near:
        cell = replica[other]
        if cell:
            return node_of(cell[-1] if other < stage else cell[0])
    return None
