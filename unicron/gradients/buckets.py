"""The buckets of a model's gradients.

The gradients of a model are, in the order in which they lie in memory, one sequence of numbers, cut into buckets of a
fixed number of bytes. The cut depends on the model's shard alone, so it is the same in every generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unicron import environment


class BucketSlice(NamedTuple):
    """A part of one tensor that lies in one bucket."""

    tensor: int
    """The tensor's index."""
    start: int
    stop: int
    """The range of the flattened tensor."""


def bucket_slices(sizes: Sequence[int], elements: int) -> list[list[BucketSlice]]:
    """Return the buckets over tensors of some sizes, in order.

    Args:
        sizes: elements of each tensor.
        elements: of a bucket; the last bucket may have fewer.
    """
    buckets: list[list[BucketSlice]] = []
    room = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = elements
            stop = min(size, start + room)
            buckets[-1].append(BucketSlice(tensor, start, stop))
            room -= stop - start
            start = stop
    return buckets


def bucket_bytes() -> int:
    """Return the size of a bucket in bytes (``environment.BUCKET_BYTES``)."""
    return int(environment.number(environment.BUCKET_BYTES))
