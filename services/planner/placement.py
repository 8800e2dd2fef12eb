"""Counts to concrete workers, in rank order. Deterministic.

Survivors keep their worker and their relative order, lowest ranks first, so that rank 0 holds the state; new ones come
after. Tensor-parallel groups stay inside a node where one has room. Data-parallel replicas go where the task has
fewest yet: first by node, then by failure domain. Idle workers are preferred to those that another task gives up in
the same plan, since a process can start on them at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.planner.state import Node, node_of


@dataclass(frozen=True, slots=True)
class Want:
    """A task that is placed. ``keep``: usable workers it has, in the order of preference. ``group``: tensor size."""

    name: str
    count: int
    group: int
    keep: Sequence[str]


def place(
    wants: Sequence[Want], nodes: Mapping[str, Node], free: Iterable[str], busy: Collection[str]
) -> dict[str, list[str]]:
    """Return each task's workers in rank order.

    Args:
        wants: the tasks whose workers change.
        nodes: all nodes, for the domains.
        free: workers that no other task keeps, including those of ``wants``.
        busy: those of them on which a process of another task may still be.
    """
    pool = dict.fromkeys(free)
    placed: dict[str, list[str]] = {}
    for want in wants:
        chosen = _kept(want)
        placed[want.name] = chosen
        for worker in chosen:
            pool.pop(worker, None)
    for want in sorted(wants, key=lambda w: (-w.group, w.name)):
        mine = placed[want.name]
        while len(mine) < want.count:
            chosen = _next(want, mine, list(pool), nodes, busy)
            mine.extend(chosen)
            for worker in chosen:
                del pool[worker]
    return placed


def _kept(want: Want) -> list[str]:
    """Return the workers the task keeps: the first ones of ``keep``, by whole tensor groups inside a node."""
    if want.group == 1:
        return list(want.keep[: want.count])
    by_node: dict[str, list[str]] = {}
    for worker in want.keep:
        by_node.setdefault(node_of(worker), []).append(worker)
    kept: list[str] = []
    for workers in by_node.values():
        whole = len(workers) // want.group * want.group
        kept.extend(workers[:whole])
    return kept[: want.count]


def _next(
    want: Want, mine: Sequence[str], pool: Sequence[str], nodes: Mapping[str, Node], busy: Collection[str]
) -> list[str]:
    """Return the workers of the task's next tensor group (one worker without tensor parallelism)."""
    by_node: dict[str, list[str]] = {}
    for worker in pool:
        by_node.setdefault(node_of(worker), []).append(worker)
    on_node: dict[str, int] = {}
    in_domain: dict[str, int] = {}
    for worker in mine:
        node = node_of(worker)
        on_node[node] = on_node.get(node, 0) + 1
        in_domain[nodes[node].domain] = in_domain.get(nodes[node].domain, 0) + 1
    own = set(want.keep)

    def foreign(worker: str) -> bool:
        return worker in busy and worker not in own

    best: tuple[tuple[int, int, int, int, str], list[str]] | None = None
    for node, workers in by_node.items():
        if len(workers) < want.group:
            continue
        first = sorted(workers, key=lambda w: (w not in own, foreign(w)))[: want.group]
        waits = sum(foreign(worker) for worker in first)
        moved = sum(worker not in own for worker in first)
        key = (moved, on_node.get(node, 0), in_domain.get(nodes[node].domain, 0), waits, node)
        if best is None or key < best[0]:
            best = (key, first)
    if best is not None:
        return best[1]
    # No node has room for a whole group: it has to cross nodes, over as few as possible.
    fullest = sorted(by_node.items(), key=lambda item: (-len(item[1]), item[0]))
    return [worker for _, workers in fullest for worker in workers][: want.group]
