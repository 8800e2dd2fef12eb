"""Which nodes to leave out when nodes cannot reach one another: the rule, and nothing else. Pure.

Nodes probe one another in pairs (``links.py`` asks them and uses this rule). One node's word isolates nobody:

* A probe that gets through proves that its pair works in both directions, whatever the other side says.
* A pair is broken if both of its nodes tried in vain. A node that gives no answer is judged by its silence, elsewhere.
* Each broken pair that a task needs must lose a side. The node with the most broken pairs is left out, or the group of
  nodes that cannot reach the same others: most nodes cannot reach it. Of equal sides the one that is needed less is
  left out, and then the one whose name sorts last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import TypeAlias

Pair: TypeAlias = tuple[str, str]
"""Two nodes, in the order of their names."""

Reached: TypeAlias = Mapping[tuple[str, str], bool]
"""(source, target) -> whether the probe of one node to another got through. What is not known is absent."""


def pair(one: str, other: str) -> Pair:
    """Return two nodes as a pair."""
    return (one, other) if one < other else (other, one)


def broken_pairs(reached: Reached) -> frozenset[Pair]:
    """Return the pairs of which both nodes say that they cannot reach the other."""
    failed = {direction for direction, success in reached.items() if not success}
    return frozenset(pair(source, target) for source, target in failed if (target, source) in failed)


def left_out(needed: Set[str], broken: Collection[Pair], need: Mapping[str, float]) -> list[str]:
    """Return the nodes to leave out, so that no broken pair is left among the others.

    Args:
        needed: the nodes that have to reach one another. Pairs with other nodes only show which side most nodes cannot
            reach.
        broken: the broken pairs.
        need: node -> how much the present plan needs it; an absent node counts as 0.
    """
    missing: dict[str, set[str]] = {}
    for one, other in broken:
        missing.setdefault(one, set()).add(other)
        missing.setdefault(other, set()).add(one)
    out: list[str] = []
    while candidates := [node for node in sorted(missing, reverse=True) if node in needed and missing[node] & needed]:
        sides: dict[frozenset[str], list[str]] = {}
        for node in candidates:
            sides.setdefault(frozenset(missing[node]), []).append(node)
        _, side = min(sides.items(), key=lambda item: _order(len(item[0]), item[1], need))
        out += side
        for node in side:
            for other in missing.pop(node):
                missing[other].discard(node)
    return sorted(out)


def _order(broken: int, side: list[str], need: Mapping[str, float]) -> tuple[float, ...]:
    """Return the sort key of a side: the side with the least key is left out, and names decide between equal ones."""
    return (-broken, sum(need.get(node, 0.0) for node in side))
