"""The reduction of a step's gradients beside its last backward pass, for Megatron's distributed optimizer.

A bucket group (``unicron.megatron.bucket_groups``) is reduced out of place: what is received goes to a *shard*, memory
of this object of the size of the range that the rank's optimizer updates, and the local sums stay. Just before the
update shards and ranges change their contents; if the update does not come, they change them back. So until the update
every rank has the sums of its own micro-batches, and a fault costs no more than the reduction and the lost ranks'
micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron import backend
from unicron.accounting import PartialStep
from unicron.gradients.exchange import Exchange, ExchangeInPlace
from unicron.gradients.overlap import OverlappedReduction
from unicron.link.waiting import Wait
from unicron.megatron.bucket_groups import OwnRange, group_of, own_ranges, part_in
from unicron.torch_names import reduce_scatter_single


class _Sent(NamedTuple):
    """One bucket that is being reduced."""

    work: Any
    """Torch's ``Work``."""
    shard: torch.Tensor
    """The place to which this rank's range of the totals goes."""
    received: torch.Tensor | None
    """The parts of that range that the ranks have sent, one after the other; None: the collective itself adds them
    up."""


class ShardReduction(OverlappedReduction):
    """Reduces the bucket groups of one model, in their order."""

    keeps_sums = True

    def __init__(self, model: Any, tensors: Sequence[torch.Tensor] = (), exchanges: Sequence[Exchange] = ()) -> None:
        """Take the reduction over from Megatron's DistributedDataParallel.

        Args:
            model: as for ``OverlappedReduction``.
            tensors: the gradient buffers.
            exchanges: which tensors' totals are added up over other ranks, too.
        """
        super().__init__(model)
        self._exchanges = [
            ExchangeInPlace(self._own_parts([tensors[i] for i in one.tensors]), one.group) for one in exchanges
        ]
        """The exchanges of what this rank's optimizer updates. The other ranks of such a group update the same: equal
        shards are divided equally, and Megatron gives a weight that two stages share a bucket of its own."""
        self._shards: list[list[torch.Tensor]] = []
        self._launched = 0
        self._sent: deque[_Sent] = deque()
        self._unfinished: list[Any] = []
        self._totals_in_place = False

    def reset(self) -> None:
        """Forget what was received and sent of the step."""
        super().reset()
        self._unfinished += [sent.work for sent in self._sent]
        self._sent.clear()
        self._launched = 0
        self._totals_in_place = False
        for exchange in self._exchanges:
            exchange.forget()

    def give_up(self) -> list[Any]:
        """Leave the generation; return the collectives that were sent and not waited for."""
        self.reset()
        given_up, self._unfinished = self._unfinished, []
        return given_up

    def _is_sent(self, number: int) -> bool:
        return number < self._launched

    def _advance(self) -> None:
        """Send the complete bucket groups, up to the first one that is not complete."""
        while self._launched < len(self._groups) and self._is_complete(self._launched):
            self._launch()

    def _send_rest(self, step: PartialStep, wait: Wait, in_flight: int) -> None:
        while self._launched < len(self._groups):
            self._launch()

    def _launch(self) -> None:
        """Send the next bucket group."""
        group = self._groups[self._launched]
        self._hooks.before(self._launched)
        if not self._is_alone():
            for bucket, shard in zip(own_ranges(group), self._shards_of(self._launched), strict=True):
                self._sent.append(_send(self._counted(bucket), shard, group_of(group)))
        self._launched += 1

    def _counted(self, bucket: OwnRange) -> OwnRange:
        """Return a bucket's sum as it counts in the total; a copy, unless the sum is all of the total."""
        return bucket if self.portion == 1.0 else OwnRange(bucket.whole * self.portion, bucket.own)

    def _is_alone(self) -> bool:
        """Return whether the sums of this rank are the totals: it is the only replica."""
        return bool(group_of(self._groups[0]).size() == 1)

    def _shards_of(self, number: int) -> list[torch.Tensor]:
        if not self._shards:
            self._shards = [[torch.empty_like(one.own) for one in own_ranges(group)] for group in self._groups]
        return self._shards[number]

    def complete(self, wait: Wait) -> None:
        """Wait for the totals of this rank's ranges, put them in the place of the local sums, and exchange them.

        Raises:
            RuntimeError: a collective broke.
        """
        while self._sent:
            work, shard, received = self._sent[0]
            wait(work)
            self._sent.popleft()
            if received is not None:
                parts = received.chunk(received.numel() // shard.numel())
                shard.copy_(parts[0])
                for part in parts[1:]:
                    shard.add_(part)
        if self._is_alone() and self.portion != 1.0:
            for number, group in enumerate(self._groups):
                for bucket, shard in zip(own_ranges(group), self._shards_of(number), strict=True):
                    shard.copy_(bucket.own * self.portion)
        if not self._is_alone() or self.portion != 1.0:
            self._swap()
        for exchange in self._exchanges:
            exchange.run(
                lambda totals, group: wait(dist.all_reduce(totals, group=group, async_op=True)),
                undoable=not self._totals_in_place,  # the totals lie in the place of the sums, which are nowhere else
            )

    def restore(self) -> bool:
        """Put the local sums back in their place, if totals are there; return whether they were.

        The totals of a rank that is the only replica are its sums, which clipping may have changed.
        """
        if self._totals_in_place:
            self._swap()
            return True
        for exchange in self._exchanges:
            exchange.undo()
        return False

    def _swap(self) -> None:
        for number, group in enumerate(self._groups):
            for bucket, shard in zip(own_ranges(group), self._shards_of(number), strict=True):
                before = bucket.own.clone()
                bucket.own.copy_(shard)
                shard.copy_(before)
        self._totals_in_place = not self._totals_in_place

    def own_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that this rank's optimizer reads; together, all ranks' are the whole model's."""
        return [bucket.own for group in self._groups for bucket in own_ranges(group)]

    def _own_parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts of some tensors that this rank's optimizer reads, in the tensors' order."""
        own = self.own_gradients()
        return [part for tensor in tensors for mine in own if (part := part_in(mine, tensor)) is not None]


def _send(bucket: OwnRange, shard: torch.Tensor, group: Any) -> _Sent:
    """Begin to sum up a bucket over the ranks of a group."""
    if backend.current().scatters:
        return _Sent(reduce_scatter_single(shard, bucket.whole, group=group, async_op=True), shard, None)
    # Gloo has no reduce-scatter. Torch's copies the bucket and sums up the copies on all ranks, with twice the traffic,
    # and nothing tells whether its ``Work`` has ended.
    received = torch.empty_like(bucket.whole)
    return _Sent(dist.all_to_all_single(received, bucket.whole, group=group, async_op=True), shard, received)
