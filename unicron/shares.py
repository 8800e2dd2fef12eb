"""Which part of a task's state each rank copies.

What data-parallel ranks hold in common is dealt in equal shares; a rank copies its own and those of the ranks whose
partner it is (``unicron.copies.partners``). What it alone holds, its part of a divided optimizer, it copies itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unicron import copies, pieces
from unicron.pieces import OPTIMIZER, Piece
from unicron.replica import Replica


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, and how its peers reach it."""

    node: str
    domain: str
    address: tuple[str, int]
    token: bytes


def shares(held: Sequence[Piece], index: int, of: int) -> list[Piece]:
    """Return the ``index``-th of ``of`` equal shares of what some pieces hold: pieces, or ranges of them.

    The shares of all indices are what is held, each number once.
    """
    total = sum(piece.bytes for piece in held)
    low, high = total * index // of, total * (index + 1) // of
    answer = []
    at = 0
    for piece in held:
        size = pieces.dtype_of(piece.dtype).itemsize
        # An element belongs to the share that its first byte is in.
        first = min(max(-(-(low - at) // size), 0), piece.stop - piece.start)
        last = min(max(-(-(high - at) // size), 0), piece.stop - piece.start)
        if last > first:
            answer.append(piece._replace(start=piece.start + first, stop=piece.start + last))
        at += piece.bytes
    return answer


def kept_shares(places: Sequence[Place], group: Sequence[int], rank: int) -> list[int] | None:
    """Return the shares that a rank copies of what its data-parallel group holds in common: its own, and its partners'.

    Args:
        places: of all ranks.
        group: the ranks of the data-parallel group.
        rank: one of them.

    Returns:
        Indices in ``group``, or None if the group's ranks cannot be partners of each other: then copies must be sent.
    """
    where = [(place.node, place.domain) for place in places]
    partners = copies.partners([where[member] for member in group])
    apart = [p is not None and where[group[p]][1] != where[m][1] for m, p in zip(group, partners, strict=True)]
    if None in partners or (not all(apart) and len({domain for _, domain in where}) > 1):
        return None
    index = list(group).index(rank)
    return [index, *(other for other, partner in enumerate(partners) if partner == index)]


def parts(replica: Replica, kept: Sequence[int], of: int) -> dict[Piece, torch.Tensor]:
    """Return what one of ``of`` data-parallel ranks copies of the state, as flat views.

    Its part of a divided optimizer, and the shares ``kept`` of what the ranks hold in common.
    """
    held = pieces.pieces(replica)
    sharded = pieces.is_sharded(replica.model)
    own = {piece for piece in held if sharded and piece.key.startswith(f"{OPTIMIZER}/")}
    chosen = {piece: held[piece].detach().view(-1) for piece in own}
    common = [piece for piece in held if piece not in own]
    begins = {(piece.key, piece.offset): piece for piece in common}
    for piece in itertools.chain.from_iterable(shares(common, index, of) for index in kept):
        whole = begins[piece.key, piece.offset]
        chosen[piece] = held[whole].detach().view(-1)[piece.start - whole.start : piece.stop - whole.start]
    return chosen
