"""The gradient buffers of a model: the tensors that backward passes add gradients to.

Of some parameters, which every tensor-parallel rank has whole, each rank computes a part of the gradient only. With
sequence parallelism each rank computes layer norms, and adds the biases of row-parallel layers, for its part of the
sequence; norms of queries and keys see the heads of their rank. The gradients of such parameters are to be added up
over the tensor-parallel ranks, as Megatron's ``finalize_model_grads`` does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from unicron.errors import WrongLoop
from unicron.gradients.accumulators import Accumulator, InPlaceAccumulator, SeparateAccumulator
from unicron.gradients.bucket_reduction import BucketReduction
from unicron.gradients.exchange import Exchange
from unicron.gradients.fixed_point import FixedPointAccumulator
from unicron.gradients.overlap import OverlappedReduction
from unicron.gradients.precision import Precision
from unicron.gradients.shards import ShardReduction
from unicron.gradients.spans import memory_order
from unicron.megatron.bucket_groups import bucket_groups, overlaps_reduction, replace_reduction
from unicron.megatron.model import config_of, is_megatron, model_chunks, unwrapped
from unicron.megatron.optimizer import is_distributed, torch_optimizers
from unicron.megatron.tied_embedding import separate_output_weight, tied_group, tied_weight

_NORMS_OF_HEADS = ("q_layernorm", "k_layernorm")
"""Part of the name by which Megatron knows the norms of queries and keys; it does not mark their parameters."""


def partial_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients are to be added up over the tensor-parallel ranks, in the model's order.

    Args:
        model: Megatron's DistributedDataParallel, or a list of such model chunks; any other module has none.
    """
    if not is_megatron(model) or tensor_group().size() == 1:
        return []
    config = config_of(model)
    return [
        parameter
        for chunk in model_chunks(model)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
        and (
            (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
            or (config.qk_layernorm and any(norm in name for norm in _NORMS_OF_HEADS))
        )
    ]


def tensor_group() -> Any:
    """Return the tensor-parallel group of this rank."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


class GradientBuffers:
    """A model's gradient buffers. They belong to this library, so ``zero_grad`` of model and optimizer does nothing."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        """Use Megatron's buffers (``main_grad``), or make the buffers of a plain module (``.grad``)."""
        self._model = model
        # Backward passes complete the last model chunk first, and buckets are reduced in their order.
        chunks = reversed(model_chunks(model)) if overlaps_reduction(model) else model_chunks(model)
        trained = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
        buffers = [_buffer(parameter) for parameter in trained]
        order = memory_order(buffers)
        self._trained = [trained[i] for i in order]
        self.tensors = [buffers[i] for i in order]
        """The buffers: one for each trained parameter, in the order in which they lie in memory."""
        chunk_of = {id(p): number for number, chunk in enumerate(model_chunks(model)) for p in chunk.parameters()}
        self._chunks = [chunk_of[id(parameter)] for parameter in self._trained]
        self._plain = [(p, t) for p, t in zip(self._trained, self.tensors, strict=True) if p.grad is t]
        self._of_megatron = [parameter for parameter in self._trained if hasattr(parameter, "main_grad")]
        for one in (*model_chunks(model), optimizer, *torch_optimizers(optimizer)):
            for name in ("zero_grad", "zero_grad_buffer"):
                if hasattr(one, name):
                    # Most loops call it; in a resumed step it would erase the micro-batches that count as done.
                    setattr(one, name, _do_nothing)

    def accumulator(self, micro_batches: int, *, precision: Precision) -> Accumulator:
        """Return a new accumulator of the gradients of one step.

        Args:
            micro_batches: the number in one step, over all replicas.
            precision: the precision of the sum.
        """
        exchanges = self.exchanges()
        if precision is Precision.FLOAT32:
            # Megatron's buffers have the type in which its user wants gradients to be sent, and Megatron sends them so.
            of_megatron = len(self._of_megatron) == len(self._trained)
            least = self.tensors[0].dtype if of_megatron else torch.float32
            return InPlaceAccumulator(self.tensors, exchanges, least=least)
        if precision is Precision.FLOAT64:
            return SeparateAccumulator(self.tensors, dtype=torch.float64, exchanges=exchanges, chunks=self._chunks)
        # The gradients of the two uses of a tied weight are added up in the same way on one pipeline stage and on two.
        leaf = separate_output_weight(self._model)
        leaves = [] if leaf is None else [(i, leaf) for i in self._indices([tied_weight(self._model)])]
        return FixedPointAccumulator(
            self.tensors, micro_batches=micro_batches, exchanges=exchanges, leaves=leaves, chunks=self._chunks
        )

    def overlapped(self, accumulator: Accumulator) -> OverlappedReduction | None:
        """Return what reduces the gradients beside the backward passes; None: they are reduced behind them.

        That is where the model does not ask for it, and where the sums are apart from Megatron's buffers, which its
        hooks would send: those do nothing then.

        Args:
            accumulator: of the gradients.
        """
        if not overlaps_reduction(self._model):
            return None
        if not isinstance(accumulator, InPlaceAccumulator):
            for group in bucket_groups(self._model):
                replace_reduction(group, lambda parameter: None)
            return None
        if is_distributed(self._model):
            return ShardReduction(self._model, self.tensors, self.exchanges())
        return BucketReduction(self._model, accumulator, self._trained)

    def exchanges(self) -> list[Exchange]:
        """Return the gradients of which other ranks than the data-parallel ones have a part."""
        found = []
        if tied_group(self._model) is not None:
            found.append(Exchange(self._indices([tied_weight(self._model)]), partial(tied_group, self._model), 2))
        if partials := partial_parameters(self._model):
            found.append(Exchange(self._indices(partials), tensor_group, tensor_group().size()))
        return [exchange for exchange in found if exchange.tensors]

    def _indices(self, parameters: Sequence[Any]) -> tuple[int, ...]:
        """Return the indices of the parameters that are trained."""
        wanted = {id(parameter) for parameter in parameters}
        return tuple(i for i, parameter in enumerate(self._trained) if id(parameter) in wanted)

    def first_name(self, tensors: Collection[int]) -> str:
        """Return the name of the parameter that comes first in the model; empty if there is none.

        Args:
            tensors: indices of tensors, which stand for their parameters.
        """
        wanted = {id(self._trained[i]) for i in tensors}
        chunks = model_chunks(self._model)
        for number, chunk in enumerate(chunks):
            for name, parameter in unwrapped(chunk).named_parameters():
                if id(parameter) in wanted:
                    return name if len(chunks) == 1 else f"{number}.{name}"
        return ""

    def check(self) -> None:
        """Check that backward passes still add to these tensors.

        Raises:
            WrongLoop: a parameter's ``.grad`` is another tensor.
        """
        if self._plain and any(parameter.grad is not tensor for parameter, tensor in self._plain):
            raise WrongLoop("a parameter's .grad was replaced: it must stay the tensor that it is (set none to None)")

    def release(self) -> None:
        """Drop what Megatron's optimizer leaves in ``.grad``: a backward pass would add to it once more."""
        for parameter in self._of_megatron:
            parameter.grad = None


def _buffer(parameter: torch.nn.Parameter) -> torch.Tensor:
    found: torch.Tensor | None = getattr(parameter, "main_grad", None)  # of Megatron's DistributedDataParallel
    if found is None:
        found = parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return found


def _do_nothing(*args: Any, **options: Any) -> None:
    """Replace ``zero_grad``: gradients are cleared at the beginning of each step."""
