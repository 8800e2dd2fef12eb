"""Whether a rank's losses and gradients are finite, and, if not, which parameter and which micro-batch to name.

A step costs one look at its sums, before they are reduced. Only where that look finds something is more computed: the
first parameter in the model's order whose gradient on this rank is not finite, and the micro-batch that brought it.

The micro-batch is certain where its loss is not finite, where sums are exact (each micro-batch is checked before it is
added), and where one micro-batch alone was added since the sums were last found finite. Otherwise the sums no longer
tell: the error names all that it may be. A step that is done again after a fault is therefore checked micro-batch by
micro-batch (``each_until``), so that the same failure, met again, is named.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from unicron.accounting import PartialStep
from unicron.errors import NonFiniteValue
from unicron.gradients.accumulators import Accumulator
from unicron.gradients.buffers import GradientBuffers
from unicron.gradients.fixed_point import FixedPointAccumulator
from unicron.losses import read

NAMED_MICRO_BATCHES = 16
"""Most micro-batches that a message lists if one of several has failed: as many as can be read."""


class FiniteChecks:
    """Checks the losses and sums of one rank.

    Args:
        accumulator: the gradients' accumulator.
        buffers: the buffers that backward passes add to.
    """

    def __init__(self, accumulator: Accumulator, buffers: GradientBuffers) -> None:
        self._accumulator, self._buffers = accumulator, buffers
        self.each_until = 0
        """Up to this step (counted from 1) each micro-batch is checked; later steps are checked once."""
        self._checked: set[tuple[int, int]] = set()
        """Model chunk and micro-batch of the gradients in sums that were found finite."""

    def forget(self) -> None:
        """Forget what was checked: the sums are zero."""
        self._checked.clear()

    def read_losses(self, partial: PartialStep) -> None:
        """Read the losses that are tensors, and numbers of tokens, all at once; the passes of the step are done.

        Raises:
            NonFiniteValue: one is not finite.
        """
        kept = (partial.losses, partial.tokens)
        found = read({(i, k): v for i in (0, 1) for k, v in kept[i].items() if isinstance(v, torch.Tensor)})
        partial.tokens.update({k: value for (i, k), value in found.items() if i == 1})
        partial.losses.update(self.losses(partial, {k: value for (i, k), value in found.items() if i == 0}))

    def losses(self, partial: PartialStep, losses: dict[int, Any]) -> dict[int, Any]:
        """Check the losses of micro-batches whose gradients are in the buffers; those that are tensors only later.

        Returns:
            The losses; as numbers in a step that is checked micro-batch by micro-batch.

        Raises:
            NonFiniteValue: one is not finite.
        """
        losses = read(losses) if partial.step <= self.each_until else losses
        for k, loss in losses.items():
            if isinstance(loss, float) and not math.isfinite(loss):
                text = f"loss {loss} in micro-batch {k} of step {partial.step}"
                raise self._error(text, self._spoilt_buffers(), [k])
        return losses

    def refused(self, partial: PartialStep, error: NonFiniteValue, added: set[int]) -> NonFiniteValue:
        """Return the error for micro-batches that the accumulator has refused to add."""
        text = f"{error}, in micro-batches {sorted(added)} of step {partial.step}"
        return self._error(text, self._spoilt_buffers(), sorted(added))

    def committed(self, partial: PartialStep) -> None:
        """Check the sums after a micro-batch, in a step that is checked micro-batch by micro-batch.

        Raises:
            NonFiniteValue: a sum is not finite.
        """
        if partial.step <= self.each_until:
            self.sums(partial)

    def sums(self, partial: PartialStep) -> None:
        """Check the sums that are not yet reduced.

        Raises:
            NonFiniteValue: this rank's gradients are not finite.
        """
        try:
            self._accumulator.check_finite(partial.reduced)
        except NonFiniteValue as error:
            raise self.named(partial, error) from None
        self._checked = _added(partial)

    def named(self, partial: PartialStep, error: NonFiniteValue) -> NonFiniteValue:
        """Return the error of sums that are not finite, with where it comes from as far as that is known."""
        if error.parameter:
            return error
        text = str(error) if "in step" in str(error) else f"{error} in step {partial.step}"
        suspects = sorted({k for _, k in _added(partial) - self._checked})
        return self._error(text, self._spoilt_sums(partial.reduced), suspects)

    def _error(self, text: str, tensors: set[int], suspects: list[int]) -> NonFiniteValue:
        parameter = self._buffers.first_name(tensors)
        micro_batch = suspects[0] if len(suspects) == 1 else None
        if parameter:
            text += f"; the first parameter is {parameter}"
        if micro_batch is not None and "micro-batch" not in text:
            text += f"; micro-batch {micro_batch}"
        elif len(suspects) > 1 and "micro-batch" not in text:
            some = ", ".join(map(str, suspects[:NAMED_MICRO_BATCHES]))
            text += f"; one of the micro-batches {some}{', ...' if len(suspects) > NAMED_MICRO_BATCHES else ''}"
        return NonFiniteValue(text, parameter=parameter, micro_batch=micro_batch)

    def _spoilt_buffers(self) -> set[int]:
        """Return the indices of the tensors whose buffers are not finite, or too large to be added."""
        accumulator = self._accumulator
        limit = accumulator.limit if isinstance(accumulator, FixedPointAccumulator) else math.inf
        largest = [float(torch.linalg.vector_norm(tensor, math.inf)) for tensor in accumulator.tensors]
        return {i for i, value in enumerate(largest) if not (math.isfinite(value) and value <= limit)}

    def _spoilt_sums(self, first: int) -> set[int]:
        """Return the indices of the tensors with sums that are not finite, in the buckets from ``first`` on."""
        found: set[int] = set()
        for bucket in range(first, self._accumulator.buckets):
            total = self._accumulator.load(bucket)
            offset = 0
            for tensor, start, stop in self._accumulator.slices[bucket]:
                part = total[..., offset : offset + stop - start]
                if not bool(torch.isfinite(part).all()):
                    found.add(tensor)
                offset += stop - start
            self._accumulator.reuse(total)
        return found


def _added(partial: PartialStep) -> set[tuple[int, int]]:
    """Return model chunk and micro-batch of the gradients in the sums."""
    return {(chunk, k) for chunk, done in enumerate(partial.done) for k in done}
