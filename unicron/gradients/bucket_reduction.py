"""The reduction of a step's gradients beside its last backward pass, where every rank's optimizer updates everything.

The buckets are those of the reduction behind the passes (``unicron.gradients.buckets``). A bucket is sent, in a copy,
as soon as the last backward pass has added all its gradients; its total takes the place of the local sum when it has
come. So every rank has the total or its own sum of each bucket at any time, and copies exist only of buckets that are
under way. No pass waits: while ``IN_FLIGHT`` copies are under way the next bucket is not sent; it is sent at a later
gradient or behind the passes.

The last bucket's total is not stored before the ranks have agreed on the step's account. A rank on which all buckets
are reduced therefore knows what a lost rank has contributed, as without overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicron.accounting import PartialStep
from unicron.errors import NonFiniteValue
from unicron.gradients.accumulators import InPlaceAccumulator
from unicron.gradients.overlap import Hooks, OverlappedReduction
from unicron.gradients.reduction import IN_FLIGHT, Reduction
from unicron.link.waiting import Wait
from unicron.megatron.parallel import data_group


class BucketReduction(OverlappedReduction):
    """Reduces the buckets of one model's sums, in their order."""

    keeps_sums = False

    def __init__(self, model: Any, accumulator: InPlaceAccumulator, trained: Sequence[torch.nn.Parameter]) -> None:
        """Take the reduction over from Megatron's DistributedDataParallel.

        Args:
            model: as for ``OverlappedReduction``.
            accumulator: the model's sums.
            trained: the parameters whose gradients the accumulator's tensors are.
        """
        super().__init__(model)
        self._accumulator = accumulator
        number_of = {parameter: number for number, group in enumerate(self._groups) for parameter in group.params}
        self._needed = [frozenset(number_of[trained[one.tensor]] for one in bucket) for bucket in accumulator.slices]
        """The bucket groups that have gradients in each bucket."""
        self._sent: set[int] = set()
        """The bucket groups whose gradients were sent in this generation's step."""
        self._reduction: Reduction | None = None
        self._unfinished: list[Any] = []
        self._step = 0

    def reset(self) -> None:
        """Forget what was sent of the step."""
        super().reset()
        if self._reduction is not None:
            self._unfinished += self._reduction.give_up()
        self._reduction = None
        self._sent.clear()

    def give_up(self) -> list[Any]:
        """Leave the generation; return the collectives that were sent and not waited for."""
        self.reset()
        given_up, self._unfinished = self._unfinished, []
        return given_up

    def announce(self, passes: int, step: PartialStep, hooks: Hooks) -> None:
        """Note which backward passes come next."""
        super().announce(passes, step, hooks)
        if passes:
            self._begin(step)

    def complete(self, wait: Wait) -> None:
        """Wait for the last total, and write all totals, and their sums over other ranks, into the buffers.

        Raises:
            RuntimeError: a collective broke.
        """
        assert self._reduction is not None
        self._reduction.run(wait, self._before, until=self._accumulator.buckets)
        self._accumulator.finish(lambda total, ranks: wait(dist.all_reduce(total, group=ranks, async_op=True)))

    def _begin(self, step: PartialStep) -> Reduction:
        """Return the reduction of the step in this generation."""

        def stored(count: int) -> None:
            step.reduced = count
            self._hooks.done(count)

        self._step = step.step
        if self._reduction is None:
            self._reduction = Reduction(self._accumulator, step.reduced, data_group(), stored)
        return self._reduction

    def _is_sent(self, number: int) -> bool:
        return number in self._sent

    def _advance(self) -> None:
        """Store the totals that have come, and send the complete buckets for which there is room."""
        reduction = self._reduction
        assert reduction is not None
        if reduction.is_alone:
            return
        while True:
            under_way = reduction.launched - reduction.stored
            if under_way and reduction.stored < self._before_account and self._hooks.has_ended(reduction.oldest):
                reduction.store(lambda work: None)
            elif under_way < IN_FLIGHT and self._is_ready(reduction.launched):
                self._before(reduction.launched)
                reduction.send()
            else:
                return

    @property
    def _before_account(self) -> int:
        """Number of buckets that may be reduced before the ranks have agreed on the step's account."""
        return self._accumulator.buckets - 1

    def _is_ready(self, bucket: int) -> bool:
        """Return whether there is such a bucket, and no gradient of it is missing."""
        return bucket < len(self._needed) and all(map(self._is_complete, self._needed[bucket]))

    def _before(self, bucket: int) -> None:
        """Prepare to send a bucket.

        Raises:
            Exception: the bucket may not be sent. NonFiniteValue: it has a gradient that is not finite; in a total
            nobody could tell whose gradient that was.
        """
        self._hooks.before(bucket)
        try:
            self._accumulator.check_finite(bucket, bucket + 1)
        except NonFiniteValue as error:
            raise NonFiniteValue(f"{error} in step {self._step}") from None
        self._sent |= self._needed[bucket]

    def _send_rest(self, step: PartialStep, wait: Wait, in_flight: int) -> None:
        self._begin(step).run(wait, self._before, until=self._before_account, in_flight=in_flight)
