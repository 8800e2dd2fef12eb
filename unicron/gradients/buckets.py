"""The buckets of a model's gradients.

The gradients of a model are, in the order in which they lie in memory, one sequence of numbers, cut into buckets of a
fixed number of bytes. The cut depends on the model's shard alone, so it is the same in every generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unicron.protocol import environment

LEAST_BUCKETS = 64
"""Number of buckets into which large gradients are cut. Copies of three buckets are under way at once
(``unicron.gradients.reduction``), so they take at most 3/64 of the gradients, about 1% of what training takes:
parameters, gradients and the two moments of Adam."""

SMALL_BUCKET_BYTES = 4 << 20
"""Least size of a bucket: three of this size are small beside any process (0.3 GiB with torch imported)."""


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
        sizes: the number of elements of each tensor.
        elements: the number of elements of a bucket; the last bucket may have fewer.
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


def largest_bucket_bytes() -> int:
    """Return the size in bytes that no bucket exceeds (``environment.BUCKET_BYTES``)."""
    return int(environment.number(environment.BUCKET_BYTES))


def bucket_bytes(gradient_bytes: int) -> int:
    """Return the size of a bucket in bytes.

    Args:
        gradient_bytes: the bytes of all gradients of the rank's shard of the model.
    """
    return min(largest_bucket_bytes(), max(SMALL_BUCKET_BYTES, gradient_bytes // LEAST_BUCKETS))
