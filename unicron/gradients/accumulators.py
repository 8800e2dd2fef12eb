"""Accumulators: the sum of the gradients of one step's finished micro-batches, in buckets.

A bucket is reduced in a copy (``unicron.gradients.reduction``). A broken collective therefore leaves the accumulated
sum as it was, and the buckets reduced before keep their totals.

    InPlaceAccumulator     the buffers that backward passes add to are the sum: no memory and no time of its own. A
                           half-done backward pass spoils the sum, but only a collective of the rank's own replica can
                           break a pass off (``unicron.link.sparing``).
    SeparateAccumulator    a sum beside the buffers, to which finished micro-batches are added; float64 where small
    FixedPointAccumulator  the same, in integers (``unicron.gradients.fixed_point``)
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from unicron.errors import NonFiniteValue
from unicron.gradients.buckets import bucket_bytes, bucket_slices
from unicron.gradients.exchange import AllReduce, Exchange, ExchangeInPlace
from unicron.gradients.spans import spans


class Accumulator(ABC):
    """The sum of the finished micro-batches' gradients, and the totals of the buckets that are reduced.

    ``tensors`` are the buffers that backward passes add to: one for each parameter, in an order that is the same on all
    ranks with the same shard of the model.
    """

    in_place: ClassVar[bool] = False
    """Whether the buffers are the sums."""
    bytes_per_element: int
    """The type in which a bucket is kept, and a reduction sends it, for each gradient."""
    portion = 1.0
    """The factor by which a rank's sums are multiplied when they are reduced (``unicron.megatron.grad_scaler``)."""
    is_checked = True
    """Whether a sum that is not finite is an error; otherwise the update is skipped."""

    def __init__(self, tensors: Sequence[torch.Tensor], exchanges: Sequence[Exchange] = ()) -> None:
        """Cut the tensors into buckets.

        Args:
            tensors: the buffers.
            exchanges: which tensors' totals are added up over other ranks, too.
        """
        self.tensors = list(tensors)
        self._exchanges = list(exchanges)
        sizes = [tensor.numel() for tensor in tensors]
        elements = max(1, bucket_bytes(sum(sizes) * self.bytes_per_element) // self.bytes_per_element)
        self.slices = bucket_slices(sizes, elements)
        self.buffers = [spans([tensors[i].view(-1)[a:b] for i, a, b in bucket]) for bucket in self.slices]
        """Views of each bucket's parts of the tensors: one view where the tensors follow one another in memory."""

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self.slices)

    def clear(self) -> None:
        """Set everything to zero: a new step."""
        self.clear_from(0)

    @abstractmethod
    def clear_from(self, bucket: int) -> None:
        """Set the sums of ``bucket`` and of the buckets behind it to zero, and the buffers."""

    @abstractmethod
    def rewind(self) -> bool:
        """Drop the gradients that passes have added since the last ``add``; return False if that is impossible."""

    def is_intact(self) -> bool:
        """Return whether the totals are as ``finish`` left them, whatever the training loop has done since."""
        return True

    @abstractmethod
    def add(self, first: int, chunk: int = 0) -> None:
        """Add the buffers of a model chunk to the sums of the buckets from ``first`` on.

        Raises:
            NonFiniteValue: a value is not finite, or too large for the accumulator.
        """

    @abstractmethod
    def drop(self, chunk: int = 0) -> None:
        """Set a model chunk's buffers to zero: the micro-batch just computed is kept by another rank already."""

    @abstractmethod
    def check_finite(self, first: int) -> None:
        """Check the sums of the buckets from ``first`` on.

        Raises:
            NonFiniteValue: a sum is not finite.
        """

    @abstractmethod
    def load(self, bucket: int) -> torch.Tensor:
        """Return a copy of a bucket's sum (or total), to be reduced."""

    def reuse(self, copy: torch.Tensor) -> None:  # noqa: B027  # most accumulators make new copies
        """Take back the memory of a copy that ``load`` has returned, for a later one; nothing reads or writes it."""

    @abstractmethod
    def store(self, bucket: int, total: torch.Tensor) -> None:
        """Replace a bucket's sum by the total over all ranks."""

    @abstractmethod
    def keep(self, buckets: int) -> None:
        """Keep the totals of the first ``buckets`` buckets over the backward passes that follow."""

    @abstractmethod
    def finish(self, all_reduce: AllReduce | None = None) -> None:
        """Write the totals into the buffers, for the optimizer, and then the sums of those totals that are exchanged.

        ``load`` returns totals from before the exchange also afterwards, so this can be repeated.

        Args:
            all_reduce: sums a tensor over a group; None: nothing is exchanged.

        Raises:
            RuntimeError: a collective broke; the totals are as they were.
        """


class InPlaceAccumulator(Accumulator):
    """The buffers are the sums; totals are set aside only while an interrupted step is completed."""

    in_place = True

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        exchanges: Sequence[Exchange] = (),
        *,
        least: torch.dtype = torch.float32,
    ) -> None:
        """Reduce in the type that has the numbers of all buffers, and of ``least``."""
        self._dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), least)
        self.bytes_per_element = self._dtype.itemsize
        super().__init__(tensors, exchanges)
        self._set_aside: list[torch.Tensor] = []
        self._spare: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Memory for copies, by their numbers of elements. Fresh memory would be mapped page by page in every step."""
        self._in_place = [
            ExchangeInPlace([tensors[i].view(-1) for i in one.tensors], one.group, self._dtype) for one in exchanges
        ]
        self._finished: list[int] = []
        """The tensors' versions when the totals were written: torch counts what changes a tensor in place."""

    def clear(self) -> None:
        """Set everything to zero."""
        self._set_aside = []
        for exchange in self._in_place:
            exchange.forget()
        super().clear()

    def clear_from(self, bucket: int) -> None:
        """Set later sums to zero; totals that were set aside stay."""
        self._undo_exchanges()
        _zero([buffer for buffers in self.buffers[bucket:] for buffer in buffers])

    def rewind(self) -> bool:
        """Return False: a half-done backward pass has changed the sum."""
        return False

    def is_intact(self) -> bool:
        """Return whether nothing has changed the buffers since, as clipping does. Changes of ``.data`` do not show."""
        return self._finished == self._versions()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]

    def add(self, first: int, chunk: int = 0) -> None:
        """Do nothing, since the backward pass has added the gradients."""

    def drop(self, chunk: int = 0) -> None:
        """Do nothing: the members deal such a micro-batch only if all totals of this shard are set aside."""
        assert len(self._set_aside) == self.buckets, "a micro-batch was dealt that is already in the sum"

    def check_finite(self, first: int, stop: int | None = None) -> None:
        """Check the sums of the buckets from ``first`` on, up to ``stop``."""
        if self.is_checked:
            _check_finite([buffer for buffers in self.buffers[first:stop] for buffer in buffers])

    def load(self, bucket: int) -> torch.Tensor:
        """Return a copy of a bucket."""
        if bucket < len(self._set_aside):
            return self._set_aside[bucket].clone()
        parts = [buffer.to(self._dtype) for buffer in self.buffers[bucket]]
        spare = self._spare[sum(part.numel() for part in parts)]
        copy = torch.cat(parts, out=spare.pop()) if spare else torch.cat(parts)
        offset, exchanged = 0, self._before_exchanges()
        for tensor, start, stop in self.slices[bucket] if exchanged else ():
            if tensor in exchanged:
                copy[offset : offset + stop - start].copy_(exchanged[tensor][start:stop])
            offset += stop - start
        return copy

    def reuse(self, copy: torch.Tensor) -> None:
        """Take back the memory of a copy."""
        self._spare[copy.numel()].append(copy)

    def store(self, bucket: int, total: torch.Tensor) -> None:
        """Write a total into the buffers."""
        self._undo_exchanges()
        start = 0
        for buffer in self.buffers[bucket]:
            buffer.copy_(total[start : start + buffer.numel()])
            start += buffer.numel()

    def keep(self, buckets: int) -> None:
        """Set totals aside: backward passes add to all buckets."""
        self._set_aside = [self.load(bucket) for bucket in range(buckets)]

    def finish(self, all_reduce: AllReduce | None = None) -> None:
        """Write back the totals that were set aside, and exchange in copies."""
        self._undo_exchanges()
        for bucket, total in enumerate(self._set_aside):
            self.store(bucket, total)
        if all_reduce is not None:
            for exchange in self._in_place:
                exchange.run(all_reduce, undoable=True)
        self._finished = self._versions()

    def _before_exchanges(self) -> dict[int, torch.Tensor]:
        """Return, for each tensor that was exchanged, by its index, the total from before the exchange."""
        return {
            i: before
            for exchange, in_place in zip(self._exchanges, self._in_place, strict=True)
            for i, before in zip(exchange.tensors, in_place.before, strict=bool(in_place.before))
        }

    def _undo_exchanges(self) -> None:
        """Write the totals from before the exchanges back."""
        for exchange in self._in_place:
            exchange.undo()


class _Location(NamedTuple):
    """The place of a part of a tensor among the buckets."""

    bucket: int
    offset: int
    """The place at which the part begins in the bucket."""
    buffer: torch.Tensor
    """The view of the tensor."""


def _locations(bucket: int, buffers: Sequence[torch.Tensor]) -> list[_Location]:
    """Return the places of the views of which a bucket consists."""
    offsets = itertools.accumulate((buffer.numel() for buffer in buffers), initial=0)
    return [_Location(bucket, offset, buffer) for offset, buffer in zip(offsets, buffers, strict=False)]


class SeparateAccumulator(Accumulator):
    """Sums beside the buffers."""

    numbers_per_element = 1
    """Number of integers or floats that represent one sum."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        exchanges: Sequence[Exchange] = (),
        leaves: Sequence[tuple[int, torch.Tensor]] = (),
        chunks: Sequence[int] = (),
    ) -> None:
        """Allocate the sums.

        Args:
            tensors: the tensors that backward passes add to.
            dtype: the type of the sums.
            exchanges: those of ``Accumulator``.
            leaves: further tensors that backward passes add to, with the index of the tensor that each belongs to.
            chunks: for each tensor, the number of its model chunk; empty: there is one chunk. Tensors of two chunks
                have no memory in common.
        """
        self._dtype = dtype
        self.bytes_per_element = dtype.itemsize * self.numbers_per_element
        super().__init__(tensors, exchanges)
        self._locations = [self._locate(tensors[i], i) for i in range(len(tensors))]
        device = tensors[0].device
        self._sums = [self._zeros(sum(b.numel() for b in buffers), device) for buffers in self.buffers]
        numbers = chunks or [0] * len(tensors)
        self._sources: list[list[torch.Tensor]] = [[] for _ in range(1 + max(numbers))]
        """The tensors that backward passes add to, for each model chunk."""
        for i, source in [*enumerate(tensors), *leaves]:
            self._sources[numbers[i]].append(source)
        self._added: list[list[list[_Location]]] = [[[] for _ in self.slices] for _ in self._sources]
        """The places of the parts, for each model chunk and bucket."""
        chunk_of = {t.untyped_storage().data_ptr(): chunk for t, chunk in zip(tensors, numbers, strict=True)}
        for bucket, buffers in enumerate(self.buffers):
            for location in _locations(bucket, buffers):
                self._added[chunk_of[location.buffer.untyped_storage().data_ptr()]][bucket].append(location)
        for i, leaf in leaves:
            for location in self._locate(leaf, i):
                self._added[numbers[i]][location.bucket].append(location)

    def _locate(self, source: torch.Tensor, tensor: int) -> list[_Location]:
        """Return the parts of ``source`` in the buckets; ``source`` stands for the tensor with an index."""
        found = []
        for number, bucket in enumerate(self.slices):
            offset = 0
            for i, start, stop in bucket:
                if i == tensor:
                    found.append(_Location(number, offset, source.view(-1)[start:stop]))
                offset += stop - start
        return found

    def _zeros(self, elements: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(elements, dtype=self._dtype, device=device)

    def clear_from(self, bucket: int) -> None:
        """Set later sums, and the buffers, to zero."""
        _zero(self._sums[bucket:])
        self.rewind()

    def rewind(self) -> bool:
        """Set the buffers to zero: the sums contain finished micro-batches only."""
        _zero([source for sources in self._sources for source in sources])
        return True

    def drop(self, chunk: int = 0) -> None:
        """Set a chunk's buffers to zero."""
        _zero(self._sources[chunk])

    def add(self, first: int, chunk: int = 0) -> None:
        """Add a chunk's buffers to the sums, and set them to zero."""
        for total, locations in zip(self._sums[first:], self._added[chunk][first:], strict=True):
            for _, offset, buffer in locations:
                total[offset : offset + buffer.numel()].add_(buffer)
        self.drop(chunk)

    def check_finite(self, first: int) -> None:
        """Check the sums of the buckets from ``first`` on."""
        if self.is_checked:
            _check_finite(self._sums[first:])

    def load(self, bucket: int) -> torch.Tensor:
        """Return a copy of a bucket."""
        return self._sums[bucket].clone()

    def store(self, bucket: int, total: torch.Tensor) -> None:
        """Replace a bucket."""
        self._sums[bucket].copy_(total)

    def keep(self, buckets: int) -> None:
        """Do nothing: backward passes do not touch the totals."""

    def finish(self, all_reduce: AllReduce | None = None) -> None:
        """Write the totals into the buffers, and exchange in copies; the sums stay as they are."""
        for total, buffers in zip(self._sums, self.buffers, strict=True):
            start = 0
            for buffer in buffers:
                buffer.copy_(self._value(total[..., start : start + buffer.numel()]))
                start += buffer.numel()
        if all_reduce is None:
            return
        for exchange in self._exchanges:
            places = [place for i in exchange.tensors for place in self._locations[i]]
            both = torch.cat([self._sums[b][..., o : o + buffer.numel()] for b, o, buffer in places], dim=-1)
            all_reduce(both, exchange.group())
            sums = torch.split(self._value(both), [buffer.numel() for _, _, buffer in places])
            for (_, _, buffer), total in zip(places, sums, strict=True):
                buffer.copy_(total)

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        return total


def _zero(tensors: list[torch.Tensor]) -> None:
    """Set tensors to zero: all in one call, which on a device is one kernel."""
    if tensors:
        torch._foreach_zero_(tensors)


def _check_finite(tensors: list[torch.Tensor]) -> None:
    """Check all tensors with one look at the device.

    Raises:
        NonFiniteValue: an element is not finite.
    """
    sums = [tensor.sum() for tensor in tensors]
    if not sums or math.isfinite(sums[0] if len(sums) == 1 else torch.stack(sums).sum()):
        return
    # A sum may overflow although no element does.
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise NonFiniteValue("gradient")
