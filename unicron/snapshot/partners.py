"""The partner of each rank: the rank that keeps a second copy of its snapshot, in another failure domain. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a rank, and how its peers reach it."""

    node: str
    domain: str
    """The failure domain."""
    address: tuple[str, int]
    """The address of the rank's receiver of snapshots."""
    token: bytes
    """The token that a sender presents to the receiver."""


def partners(places: Sequence[tuple[str, str]]) -> list[int | None]:
    """Return for each rank the rank that keeps a second copy of its part.

    The partner is in another failure domain if there is one, else on another node if there is one; else there is no
    partner: no single failure domain (or node) then has all copies of a part. Partners are chosen evenly, the next
    ranks first.

    Args:
        places: (node, failure domain) of each rank.
    """
    assigned = [0] * len(places)
    found: list[int | None] = []
    for rank, (node, domain) in enumerate(places):
        others = [r for r, (_, d) in enumerate(places) if d != domain]
        others = others or [r for r, (n, _) in enumerate(places) if n != node]
        chosen = min(others, key=lambda r: (assigned[r], (r - rank) % len(places)), default=None)
        if chosen is not None:
            assigned[chosen] += 1
        found.append(chosen)
    return found


def is_replicated(places: Sequence[tuple[str, str]], shards: Sequence[tuple[int, int]]) -> bool:
    """Return whether each shard of the model is in two failure domains (on two nodes, where there is one domain).

    Args:
        places: (node, failure domain) of each rank.
        shards: which shard each rank has.
    """
    by_domain = len({domain for _, domain in places}) > 1
    where: dict[tuple[int, int], set[str]] = {}
    for (node, domain), shard in zip(places, shards, strict=True):
        where.setdefault(shard, set()).add(domain if by_domain else node)
    return all(len(found) > 1 for found in where.values())


def copied_shares(locations: Sequence[Location], group: Sequence[int], rank: int) -> list[int] | None:
    """Return the shares that a rank copies of what its data-parallel group has in common: its own and its partners'.

    Args:
        locations: those of all ranks.
        group: the ranks of the data-parallel group.
        rank: one of them.

    Returns:
        Indices in ``group``, or None if the group's ranks cannot be partners of one another; snapshots must
        be sent then.
    """
    places = [(location.node, location.domain) for location in locations]
    found = partners([places[member] for member in group])
    apart = [p is not None and places[group[p]][1] != places[m][1] for m, p in zip(group, found, strict=True)]
    if None in found or (not all(apart) and len({domain for _, domain in places}) > 1):
        return None
    index = list(group).index(rank)
    return [index, *(other for other, partner in enumerate(found) if partner == index)]
