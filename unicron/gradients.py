"""Accumulating the gradients of one step, and reducing them bucket by bucket, out of place.

The gradients of a model are, in the order of its parameters, one sequence of numbers, cut into buckets of a fixed
number of bytes: a layout that depends on the model's shard alone, so that it is the same in every generation. A bucket
is reduced in a copy: a broken collective leaves what was accumulated as it was, and what was reduced before stays.

    InPlace     the buffers that backward passes add to are the sum: no memory and no time of its own. A half-done
                backward pass spoils it, so it is for data parallelism alone, where no collective can break inside one.
    Apart       a sum beside the buffers, to which finished micro-batches are added: in float64 where that is small
    FixedPoint  the same, in integers (``unicron.fixed_point``)
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicron.errors import NonFiniteValue
from unicron.runtime import Wait

BUCKET_VARIABLE = "UNICRON_BUCKET_BYTES"
"""Environment variable: bytes of a bucket, the same for all ranks of a task."""

BUCKET_BYTES = 32 << 20
"""Large enough that the latency of a collective (below 1 ms) is nothing beside its transfer; small enough that a fault
redoes little."""

FLOAT64_VARIABLE = "UNICRON_FLOAT64_LIMIT_BYTES"
"""Environment variable: the largest sums that are kept in float64, the same for all ranks of a task."""

FLOAT64_LIMIT_BYTES = 1 << 30
"""Of the order of a hundredth of a device's memory. In float64 the order of additions changes about one bit in 2**29 of
the float32 totals; in float32 it changes many, and Adam turns the rounding of near-zero gradients into steps."""

Slice = tuple[int, int, int]
"""(tensor, first element, end)."""

Exchange = Callable[[torch.Tensor], None]
"""Sums a tensor, in place, over the ranks that share a parameter."""


def layout(sizes: Sequence[int], elements: int) -> list[list[Slice]]:
    """Return the buckets of ``elements`` elements (the last may have fewer) over tensors of some sizes, in order."""
    buckets: list[list[Slice]] = []
    room = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = elements
            end = min(size, start + room)
            buckets[-1].append((tensor, start, end))
            room -= end - start
            start = end
    return buckets


def bucket_bytes() -> int:
    """Return the size of a bucket: the environment's, or ``BUCKET_BYTES``."""
    return int(os.environ.get(BUCKET_VARIABLE, BUCKET_BYTES))


def fit_float64(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether sums of these tensors are small enough for float64."""
    limit = int(os.environ.get(FLOAT64_VARIABLE, FLOAT64_LIMIT_BYTES))
    return sum(tensor.numel() for tensor in tensors) * torch.float64.itemsize <= limit


class Accumulator:
    """The sum of the finished micro-batches' gradients, and of reduced buckets the total.

    ``tensors`` are what backward passes add to: one for each parameter, in an order that is the same on all ranks that
    hold the shard.
    """

    bytes_per_element: int
    """What a bucket holds, and a reduction sends, for each gradient."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Lay the buckets out."""
        self.tensors = list(tensors)
        self.layout = layout([t.numel() for t in tensors], max(1, bucket_bytes() // self.bytes_per_element))
        self.pieces = [[tensors[i].view(-1)[a:b] for i, a, b in bucket] for bucket in self.layout]

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return len(self.layout)

    def clear(self) -> None:
        """Set everything to zero: a new step."""
        self.clear_from(0)

    def clear_from(self, bucket: int) -> None:
        """Set the sums of ``bucket`` and those after it to zero, and the buffers."""
        raise NotImplementedError

    def rewind(self) -> bool:
        """Drop what backward passes have added since the last ``add``; return False if that cannot be told apart."""
        raise NotImplementedError

    def add(self, first: int) -> None:
        """Add what backward passes have left in the buffers to the sums of buckets from ``first`` on.

        Raises:
            NonFiniteValue: a value is not finite, or too large to be held.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """Zero the buffers: the micro-batch just computed is already counted by another rank."""
        raise NotImplementedError

    def check_finite(self, first: int) -> None:
        """Look at the sums of buckets from ``first`` on.

        Raises:
            NonFiniteValue: one is not finite.
        """
        raise NotImplementedError

    def load(self, bucket: int) -> torch.Tensor:
        """Return a copy of a bucket's sum (or total), to be reduced."""
        raise NotImplementedError

    def store(self, bucket: int, total: torch.Tensor) -> None:
        """Replace a bucket's sum by the total over all ranks."""
        raise NotImplementedError

    def keep(self, buckets: int) -> None:
        """Keep the first ``buckets`` totals over the computing that follows."""

    def finish(self, exchange: Exchange | None = None) -> None:
        """Put the totals into the buffers, for the optimizer.

        Args:
            exchange: sums the gradients of a parameter that other pipeline stages hold too; None where there is none.
        """
        raise NotImplementedError


class InPlace(Accumulator):
    """The buffers are the sums; totals are set aside only while an interrupted step is completed."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reduce in the buffers' type, at least in float32."""
        self._dtype = torch.float32
        for tensor in tensors:
            self._dtype = torch.promote_types(self._dtype, tensor.dtype)
        self.bytes_per_element = self._dtype.itemsize
        super().__init__(tensors)
        self._aside: list[torch.Tensor] = []

    def clear(self) -> None:
        """Set everything to zero."""
        self._aside = []
        super().clear()

    def clear_from(self, bucket: int) -> None:
        """Set later sums to zero; what was set aside before stays."""
        for pieces in self.pieces[bucket:]:
            for piece in pieces:
                piece.zero_()

    def rewind(self) -> bool:
        """Return False: a half-done backward pass has changed the sum."""
        return False

    def add(self, first: int) -> None:
        """Do nothing: the backward pass has added."""

    def check_finite(self, first: int) -> None:
        """Look at the sums of buckets from ``first`` on."""
        _check_finite(piece for pieces in self.pieces[first:] for piece in pieces)

    def load(self, bucket: int) -> torch.Tensor:
        """Return a copy of a bucket."""
        if bucket < len(self._aside):
            return self._aside[bucket].clone()
        return torch.cat([piece.to(self._dtype) for piece in self.pieces[bucket]])

    def store(self, bucket: int, total: torch.Tensor) -> None:
        """Write a total into the buffers."""
        start = 0
        for piece in self.pieces[bucket]:
            piece.copy_(total[start : start + piece.numel()])
            start += piece.numel()

    def keep(self, buckets: int) -> None:
        """Set totals aside: backward passes add to all buckets."""
        self._aside = [self.load(bucket) for bucket in range(buckets)]

    def finish(self, exchange: Exchange | None = None) -> None:
        """Put back what was set aside."""
        assert exchange is None
        for bucket, total in enumerate(self._aside):
            self.store(bucket, total)


class Apart(Accumulator):
    """Sums beside the buffers."""

    parts = 1
    """Numbers that hold one element."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        shared: int | None = None,
        leaves: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> None:
        """Allocate the sums.

        Args:
            tensors: what backward passes add to.
            dtype: of the sums.
            shared: the tensor whose parameter another pipeline stage holds too.
            leaves: further tensors that backward passes add to, with the number of the tensor they belong to.
        """
        self._dtype = dtype
        self.bytes_per_element = dtype.itemsize * self.parts
        super().__init__(tensors)
        self._sources = [self._locate(tensors[i], i) for i in range(len(tensors))]
        self._sources += [self._locate(leaf, i) for i, leaf in leaves]
        self._leaves = [leaf for _, leaf in leaves]
        self._shared = shared
        device = tensors[0].device
        self._sums = [self._zeros(sum(p.numel() for p in pieces), device) for pieces in self.pieces]
        by_bucket: list[list[tuple[int, torch.Tensor]]] = [[] for _ in self.layout]
        for located in self._sources:
            for bucket, offset, piece in located:
                by_bucket[bucket].append((offset, piece))
        self._added = by_bucket

    def _locate(self, source: torch.Tensor, tensor: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return (bucket, offset in it, piece of ``source``) of the places that belong to a tensor."""
        found = []
        for number, bucket in enumerate(self.layout):
            offset = 0
            for i, start, end in bucket:
                if i == tensor:
                    found.append((number, offset, source.view(-1)[start:end]))
                offset += end - start
        return found

    def _zeros(self, elements: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(elements, dtype=self._dtype, device=device)

    def clear_from(self, bucket: int) -> None:
        """Set later sums, and the buffers, to zero."""
        for total in self._sums[bucket:]:
            total.zero_()
        self.drop()

    def rewind(self) -> bool:
        """Zero the buffers: the sums hold finished micro-batches only."""
        self.drop()
        return True

    def drop(self) -> None:
        """Zero the buffers."""
        for tensor in [*self.tensors, *self._leaves]:
            tensor.zero_()

    def add(self, first: int) -> None:
        """Add the buffers to the sums, and zero them."""
        for total, sources in zip(self._sums[first:], self._added[first:], strict=True):
            for offset, piece in sources:
                total[offset : offset + piece.numel()].add_(piece)
        self.drop()

    def check_finite(self, first: int) -> None:
        """Look at the sums of buckets from ``first`` on."""
        _check_finite(self._sums[first:])

    def load(self, bucket: int) -> torch.Tensor:
        """Return a copy of a bucket."""
        return self._sums[bucket].clone()

    def store(self, bucket: int, total: torch.Tensor) -> None:
        """Replace a bucket."""
        self._sums[bucket].copy_(total)

    def finish(self, exchange: Exchange | None = None) -> None:
        """Put the totals into the buffers; they stay as they are, so this can be repeated."""
        for total, pieces in zip(self._sums, self.pieces, strict=True):
            start = 0
            for piece in pieces:
                piece.copy_(self._value(total[..., start : start + piece.numel()]))
                start += piece.numel()
        if exchange is not None and self._shared is not None:
            places = self._sources[self._shared]
            both = torch.cat([self._sums[b][..., o : o + piece.numel()] for b, o, piece in places], dim=-1)
            exchange(both)
            self.tensors[self._shared].view(-1).copy_(self._value(both))

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        return total


def _check_finite(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        # The sum is cheap, but may overflow where no element does.
        if not math.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteValue("gradient")


IN_FLIGHT = 3
"""Reductions under way at once: the transfer of one covers the copies of the next and of the one before."""


def reduce(
    sums: Accumulator,
    first: int,
    group: Any,
    wait: Wait,
    *,
    before: Callable[[int], None],
    done: Callable[[int], None],
    broken: Callable[[list[Any]], None],
    in_flight: int = IN_FLIGHT,
) -> None:
    """Replace the sums of buckets from ``first`` on by their totals over ``group``, in order.

    Args:
        sums: what is reduced.
        first: the first bucket that is not yet reduced.
        group: the ranks that hold the same shard.
        wait: waits for a collective.
        before: called before a bucket is sent.
        done: called with the number of buckets that are reduced, whenever one more is.
        broken: called with the collectives that were sent and not waited for, if one broke or was left: they may never
            end, and what destroys their group would wait for them.
        in_flight: how many are sent before the first of them is waited for.

    Raises:
        RuntimeError: a collective broke; what ``done`` was told of is kept.
    """
    sent: deque[tuple[int, torch.Tensor, Any]] = deque()

    def complete() -> None:
        bucket, total, work = sent.popleft()
        wait(work)
        sums.store(bucket, total)
        done(bucket + 1)

    try:
        for bucket in range(first, sums.buckets):
            before(bucket)
            if group.size() == 1:
                done(bucket + 1)  # the sum is the total
                continue
            total = sums.load(bucket)
            sent.append((bucket, total, dist.all_reduce(total, group=group, async_op=True)))
            if len(sent) == in_flight:
                complete()
        while sent:
            complete()
    except BaseException:
        broken([work for _, _, work in sent])
        raise
