"""Boxes: rectangles of a global tensor, their intersections and differences. Pure.

A chunk of state consists of boxes: one for a whole shard, a few for a flat range of a shard.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from unicron.state.chunks import StateChunk


class Box(NamedTuple):
    """A rectangle of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes_of(chunk: StateChunk) -> list[tuple[Box, int]]:
    """Return the boxes of a chunk, each with the element at which it begins in the chunk's flattened values.

    A box is contiguous in those values.
    """
    begin = 0
    found = []
    for offset, shape in _boxes_of_range(chunk.shape, chunk.start, chunk.stop):
        in_tensor = tuple(o + base for o, base in zip(offset, chunk.offset, strict=True))
        found.append((Box(in_tensor, shape), begin))
        begin += math.prod(shape)
    return found


def _boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the boxes, in order, of a range of a flattened tensor: at most two for each axis."""
    if stop <= start:
        return []
    if start == 0 and stop == math.prod(shape):
        return [Box((0,) * len(shape), shape)]
    rest = shape[1:]
    row = math.prod(rest)
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _in_row(first, _boxes_of_range(rest, start - first * row, stop - first * row))
    found: list[Box] = []
    if start % row:
        found += _in_row(first, _boxes_of_range(rest, start - first * row, row))
        first += 1
    full = stop // row
    if full > first:
        found.append(Box((first,) + (0,) * len(rest), (full - first, *rest)))
    if stop % row:
        found += _in_row(full, _boxes_of_range(rest, 0, stop - full * row))
    return found


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    """Return boxes of one row of a tensor as boxes of the tensor."""
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes]


def intersection(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes, if there is one."""
    low = tuple(max(a, b) for a, b in zip(one.offset, other.offset, strict=True))
    ends = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    high = tuple(min(a + n, b + m) for a, n, b, m in ends)
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))


def difference(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that cover ``box`` except for ``hole``, which lies inside ``box``."""
    found: list[Box] = []
    offset, shape = list(box.offset), list(box.shape)
    for axis in range(len(shape)):
        begin, end = hole.offset[axis], hole.offset[axis] + hole.shape[axis]
        if begin > offset[axis]:
            found.append(Box(tuple(offset), (*shape[:axis], begin - offset[axis], *shape[axis + 1 :])))
        if end < offset[axis] + shape[axis]:
            beyond = offset[axis] + shape[axis] - end
            found.append(Box((*offset[:axis], end, *offset[axis + 1 :]), (*shape[:axis], beyond, *shape[axis + 1 :])))
        offset[axis], shape[axis] = begin, end - begin
    return found


def view_of_box(chunk: StateChunk, values: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of a chunk as a view of the chunk's values.

    Args:
        chunk: what a rank has in memory.
        values: its tensor (of the shard's shape, or flat).
        box: lies inside one of the chunk's ``boxes_of``.

    Raises:
        ValueError: the box lies in none of them.
    """
    for whole, start in boxes_of(chunk):
        if intersection(whole, box) == box:
            contiguous = values if chunk.is_whole else values.view(-1)[start : start + math.prod(whole.shape)]
            view = contiguous.view(whole.shape)
            begins = zip(box.offset, whole.offset, box.shape, strict=True)
            return view[tuple(slice(o - b, o - b + n) for o, b, n in begins)]
    raise ValueError(f"the box at {box.offset} of {box.shape} is in no box of {chunk}")
