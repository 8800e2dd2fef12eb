"""The reduction of a step's gradients beside its last backward pass, for Megatron's distributed optimizer.

A bucket group (``unicron.megatron.bucket_groups``) is sent as soon as the last backward pass of the step has added the
last of its gradients. It is reduced out of place: what is received goes to a *shard*, memory of this object of the size
of the range that the rank's optimizer updates, and the local sums stay. Just before the update shards and ranges change
their contents; if the update does not come, they change them back. So until the update every rank has the sums of its
own micro-batches, and a fault costs no more than the reduction and the lost ranks' micro-batches.

No error leaves a hook: a backward pass that is interrupted would leave sums that nobody can use. The first error is
kept, nothing more is sent, and the error is raised when the step is reduced.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron.errors import UnsupportedModel, WrongLoop
from unicron.gradients.exchange import Exchange, ExchangeInPlace
from unicron.gradients.precision import Precision
from unicron.link.waiting import Wait
from unicron.megatron.bucket_groups import (
    OwnRange,
    bucket_groups,
    group_of,
    overlaps_reduction,
    own_ranges,
    part_in,
    replace_reduction,
)

Before = Callable[[int], None]
"""Called before a bucket group is sent, with its number; an error keeps it from being sent."""


class _Sent(NamedTuple):
    """One bucket that is being reduced."""

    work: Any
    """Torch's ``Work``."""
    shard: torch.Tensor
    """Where this rank's range of the totals goes."""
    received: torch.Tensor | None
    """What the ranks have sent of that range, one after the other; None: the collective itself adds them up."""


class OverlappedReduction:
    """Reduces the bucket groups of one model, in their order, in one step after the other.

    The order is the same on all ranks: also a rank that computes nothing in a resumed step, or that does not know yet
    when its groups are complete, sends them in it.
    """

    def __init__(self, model: Any, tensors: Sequence[torch.Tensor] = (), exchanges: Sequence[Exchange] = ()) -> None:
        """Take the reduction over from Megatron's DistributedDataParallel; the arguments are those of ``of``."""
        self._groups = bucket_groups(model)
        self._exchanges = [
            ExchangeInPlace(self._own_parts([tensors[i] for i in one.tensors]), one.group) for one in exchanges
        ]
        """Of what this rank's optimizer updates. The other ranks of such a group update the same: equal shards are
        divided equally, and Megatron gives a weight that two stages share a bucket of its own."""
        self._shards: list[list[torch.Tensor]] = []
        self._expected: list[Counter[torch.nn.Parameter]] = []
        """For each group, how often one micro-batch adds a gradient to each parameter; empty: not known yet."""
        self._counts: list[Counter[torch.nn.Parameter]] = []
        self._left: list[int] = []
        """For each group, how many gradients the passes that were announced have still to add."""
        self._passes = 0
        self._before: Before = lambda number: None
        self._launched = 0
        self._sent: deque[_Sent] = deque()
        self._unfinished: list[Any] = []
        self._error: Exception | None = None
        self._totals_in_place = False
        for number, group in enumerate(self._groups):
            replace_reduction(group, partial(self._added, number))

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        precision: Precision,
        tensors: Sequence[torch.Tensor] = (),
        exchanges: Sequence[Exchange] = (),
    ) -> OverlappedReduction | None:
        """Return what reduces the gradients of a model beside its backward passes; None: the model does not ask for it.

        Args:
            model: as ``build`` returned it, and checked (``unicron.megatron.supported``).
            precision: of the sums of gradients.
            tensors: the gradient buffers.
            exchanges: of which of them the totals are added up over other ranks, too.

        Raises:
            UnsupportedModel: the sums are not Megatron's own.
        """
        if not overlaps_reduction(model):
            return None
        if precision is not Precision.FLOAT32:
            raise UnsupportedModel(
                "DistributedDataParallelConfig.overlap_grad_reduce: must be False with exact or deterministic_sums; it "
                "sends the buffers that backward passes add to, and those sums are apart from the buffers"
            )
        return cls(model, tensors, exchanges)

    # One step.

    def reset(self) -> None:
        """Forget the step: what was received of it, and what was sent."""
        self._unfinished += [sent.work for sent in self._sent]
        self._sent.clear()
        self._counts, self._left, self._passes = [], [], 0
        self._launched, self._error = 0, None
        self._totals_in_place = False
        for exchange in self._exchanges:
            exchange.forget()

    def give_up(self) -> list[Any]:
        """Leave the generation; return the collectives that were sent and not waited for. They may never end."""
        self.reset()
        given_up, self._unfinished = self._unfinished, []
        return given_up

    def announce(self, passes: int, before: Before) -> None:
        """Note which backward passes come next.

        Args:
            passes: how many, if they are the step's last on this rank; 0: others follow.
            before: see ``Before``.
        """
        self._passes, self._before = passes, before
        if passes:
            self._counts = [Counter() for _ in self._groups]
            self._left = [passes * sum(expected.values()) for expected in self._expected]

    def _added(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Send a bucket group, and those that wait for it, if this is the last gradient of it."""
        if number < self._launched:
            self._error = self._error or WrongLoop(
                "a backward pass has added to gradients that are already sent: in each micro-batch the same parameters "
                "must get their gradients equally often"
            )
        if not self._passes:
            return
        self._counts[number][parameter] += 1
        if self._expected:
            self._left[number] -= 1
            while self._launched < len(self._groups) and self._is_complete(self._launched) and self._launch():
                pass

    def _is_complete(self, number: int) -> bool:
        if self._left[number]:
            return False
        counts = self._counts[number]
        return all(counts[p] == n * self._passes for p, n in self._expected[number].items())

    def _launch(self) -> bool:
        """Send the next bucket group, unless something has failed; return whether it was sent."""
        if self._error is not None:
            return False
        group = self._groups[self._launched]
        try:
            self._before(self._launched)
            if not self._is_alone():
                for bucket, shard in zip(own_ranges(group), self._shards_of(self._launched), strict=True):
                    self._sent.append(_send(bucket, shard, group_of(group)))
        except Exception as error:
            self._error = error
            return False
        self._launched += 1
        return True

    def _is_alone(self) -> bool:
        """Return whether the sums of this rank are the totals: it is the only replica."""
        return bool(group_of(self._groups[0]).size() == 1)

    def _shards_of(self, number: int) -> list[torch.Tensor]:
        if not self._shards:
            self._shards = [[torch.empty_like(one.own) for one in own_ranges(group)] for group in self._groups]
        return self._shards[number]

    def launch_rest(self, before: Before) -> None:
        """Send the bucket groups that no backward pass has sent.

        Args:
            before: see ``Before``.

        Raises:
            Exception: a group could not be sent, now or in a backward pass.
            WrongLoop: a backward pass has added to gradients that were already sent.
        """
        self._learn()
        self._passes, self._before = 0, before
        while self._launched < len(self._groups) and self._launch():
            pass
        if self._error is not None:
            raise self._error

    def _learn(self) -> None:
        """Note how many gradients one micro-batch adds, from the passes that were announced."""
        if not self._passes or self._expected:
            return
        all_have_gradients = all(
            len(counts) == len(group.params) for counts, group in zip(self._counts, self._groups, strict=True)
        )
        if all_have_gradients and not any(n % self._passes for counts in self._counts for n in counts.values()):
            self._expected = [Counter({p: n // self._passes for p, n in counts.items()}) for counts in self._counts]

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
        if not self._is_alone():
            self._swap()
        for exchange in self._exchanges:
            exchange.run(
                lambda totals, group: wait(dist.all_reduce(totals, group=group, async_op=True)),
                undoable=self._is_alone(),  # the totals lie in the place of the sums, which are nowhere else
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
        """Return the gradients that this rank's optimizer reads; the ranks' are the whole model's."""
        return [bucket.own for group in self._groups for bucket in own_ranges(group)]

    def _own_parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the gradients that this rank's optimizer reads have of some tensors, in the tensors' order."""
        own = self.own_gradients()
        return [part for tensor in tensors for mine in own if (part := part_in(mine, tensor)) is not None]


def _send(bucket: OwnRange, shard: torch.Tensor, group: Any) -> _Sent:
    """Begin to sum up a bucket over the ranks of a group."""
    if dist.get_backend(group) != "gloo":
        return _Sent(dist.reduce_scatter_single(shard, bucket.whole, group=group, async_op=True), shard, None)
    # Gloo has no reduce-scatter. Torch's copies the bucket and sums up the copies on all ranks, twice the traffic; and
    # of its ``Work`` nobody can ask whether it has ended.
    received = torch.empty_like(bucket.whole)
    return _Sent(dist.all_to_all_single(received, bucket.whole, group=group, async_op=True), shard, received)
