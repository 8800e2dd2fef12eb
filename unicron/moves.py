"""Who gives which piece of state to whom: pure, so that every member of a generation comes to the same plan.

A piece is cut into boxes (rectangles of the global tensor): one for a whole shard, a few for a flat range of one. What
a rank needs is covered box by box from what others hold; what remains uncovered exists nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from unicron.pieces import Piece, Shard, dtype_of, kinds, needed

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent."""


class Move(NamedTuple):
    """One box that a rank gives to another, or to itself."""

    source: int
    """The giver's rank."""
    held: int
    """Which of the giver's pieces."""
    taker: int
    needed: int
    """Which of the taker's pieces."""
    offset: tuple[int, ...]
    """Where the box begins in the global tensor."""
    shape: tuple[int, ...]
    bytes: int


def boxes(piece: Piece) -> list[tuple[Box, int]]:
    """Return a piece as boxes, each with where it begins in what is held, flattened: there it is contiguous."""
    found = _range_boxes(piece.shape, piece.start, piece.stop)
    at = 0
    answer = []
    for offset, shape in found:
        moved = tuple(o + base for o, base in zip(offset, piece.offset, strict=True))
        answer.append(((moved, shape), at))
        at += math.prod(shape)
    return answer


def _range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the boxes, in order, that a range of a flattened tensor consists of: at most two for each axis."""
    if stop <= start:
        return []
    if start == 0 and stop == math.prod(shape):
        return [((0,) * len(shape), shape)]
    rest = shape[1:]
    row = math.prod(rest)
    first, last = start // row, (stop - 1) // row
    if first == last:
        inner = _range_boxes(rest, start - first * row, stop - first * row)
        return [((first, *offset), (1, *extent)) for offset, extent in inner]
    answer: list[Box] = []
    if start % row:
        answer += [((first, *o), (1, *e)) for o, e in _range_boxes(rest, start - first * row, row)]
        first += 1
    full = stop // row
    if full > first:
        answer.append(((first,) + (0,) * len(rest), (full - first, *rest)))
    if stop % row:
        answer += [((full, *o), (1, *e)) for o, e in _range_boxes(rest, 0, stop - full * row)]
    return answer


def intersection(one: Box, other: Box) -> Box | None:
    """Return what two boxes have in common, if anything."""
    low = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return low, tuple(b - a for a, b in zip(low, high, strict=True))


def without(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that cover ``box`` but for ``hole``, which lies in it."""
    answer: list[Box] = []
    offset, shape = list(box[0]), list(box[1])
    for axis in range(len(shape)):
        begin, end = hole[0][axis], hole[0][axis] + hole[1][axis]
        if begin > offset[axis]:
            answer.append((tuple(offset), (*shape[:axis], begin - offset[axis], *shape[axis + 1 :])))
        if end < offset[axis] + shape[axis]:
            beyond = offset[axis] + shape[axis] - end
            answer.append(((*offset[:axis], end, *offset[axis + 1 :]), (*shape[:axis], beyond, *shape[axis + 1 :])))
        offset[axis], shape[axis] = begin, end - begin
    return answer


def region(piece: Piece, values: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Return a box of a held piece as a view of its values; the box lies in one of the piece's ``boxes``.

    Args:
        piece: what is held.
        values: its tensor, as ``pieces`` gives it (of the shard's shape, or flat).
        offset: where the box begins in the global tensor.
        shape: its extent.
    """
    for (begin, extent), at in boxes(piece):
        if intersection((begin, extent), (offset, shape)) == (offset, shape):
            whole = values if piece.whole else values.view(-1)[at : at + math.prod(extent)]
            view = whole.view(extent)
            return view[tuple(slice(o - b, o - b + n) for o, b, n in zip(offset, begin, shape, strict=True))]
    raise ValueError(f"the box at {offset} of {shape} is in no box of {piece}")


def plan_moves(
    needed: Sequence[Sequence[Piece]],
    held: Sequence[Sequence[tuple[Piece, int]]],
    version: int,
    nodes: Sequence[str] = (),
) -> list[Move] | None:
    """Return what has to move so that every rank holds all it needs at a version, or None if that exists nowhere.

    The nearest holder gives: the rank itself, one on its node, any other; of equally near ones, the one that gives
    least so far. Every member evaluates this on the same arguments and gets the same moves in the same order.

    Args:
        needed: for each rank.
        held: for each rank, pieces with their versions (steps); other versions do not count.
        version: the one that is wanted.
        nodes: each rank's node; empty: all are one.
    """
    where = nodes or [""] * len(needed)
    holders: dict[str, list[tuple[int, int, list[Box]]]] = {}
    for rank, listed in enumerate(held):
        for index, (piece, at) in enumerate(listed):
            if at == version:
                holders.setdefault(piece.key, []).append((rank, index, [box for box, _ in boxes(piece)]))
    given = [0] * len(held)
    moves: list[Move] = []
    for taker, pieces in enumerate(needed):
        for index, piece in enumerate(pieces):
            size = dtype_of(piece.dtype).itemsize
            missing = [box for box, _ in boxes(piece)]

            def distance(holder: tuple[int, int, list[Box]], taker: int = taker) -> tuple[int, int, int]:
                rank = holder[0]
                near = 0 if rank == taker else 1 if where[rank] == where[taker] else 2
                return near, given[rank], rank

            for rank, which, offered in sorted(holders.get(piece.key, []), key=distance):
                if not missing:
                    break
                for offer in offered:
                    rest: list[Box] = []
                    for wanted in missing:
                        common = intersection(wanted, offer)
                        if common is None:
                            rest.append(wanted)
                            continue
                        moved = math.prod(common[1]) * size
                        moves.append(Move(rank, which, taker, index, *common, moved))
                        given[rank] += moved if rank != taker else 0
                        rest += without(wanted, common)
                    missing = rest
            if missing:
                return None
    return moves


class Agreed(NamedTuple):
    """The state that the members of a generation will hold."""

    version: int
    needed: list[list[Piece]]
    """For each rank."""
    moves: list[Move]


def newest(
    shards: Sequence[Sequence[Shard]],
    held: Sequence[Sequence[tuple[Piece, int]]],
    *,
    sharded: bool,
    nodes: Sequence[str] = (),
) -> Agreed | None:
    """Return the newest version of which the members together hold everything that each of them needs; None: none.

    Args:
        shards: what each rank computes with.
        held: for each rank, pieces with their versions.
        sharded: whether the optimizer's state is divided among data-parallel ranks.
        nodes: each rank's node.
    """
    for version in sorted({at for listed in held for _, at in listed}, reverse=True):
        found = kinds((piece for listed in held for piece, at in listed if at == version), sharded=sharded)
        wanted = [needed(listed, found) for listed in shards]
        moves = plan_moves(wanted, held, version, nodes)
        if moves is not None:
            return Agreed(version, wanted, moves)
    return None
