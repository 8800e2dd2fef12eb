"""The tensors that backward passes add gradients to, and what adds them up over micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import torch

from unicron import gradients, model
from unicron.errors import WrongLoop
from unicron.fixed_point import FixedPoint
from unicron.gradients import Accumulator
from unicron.pieces import torch_optimizers


class Buffers:
    """A model's gradient buffers: this library's from here on, so ``zero_grad`` of model and optimizer does nothing."""

    def __init__(self, built: Any, optimizer: Any) -> None:
        """Take Megatron's (``main_grad``), or make those of a plain module (``.grad``)."""
        self._model = built
        self._trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
        self.tensors = [_buffer(parameter) for parameter in self._trained]
        """One for each trained parameter, in the model's order."""
        self._plain = [(p, t) for p, t in zip(self._trained, self.tensors, strict=True) if p.grad is t]
        for one in (built, optimizer, *torch_optimizers(optimizer)):
            for name in ("zero_grad", "zero_grad_buffer"):
                if hasattr(one, name):
                    # Most loops call it; in a resumed step it would erase what counts as done.
                    setattr(one, name, _do_nothing)

    def accumulator(self, micro_batches: int, *, exact: bool, parallel: bool) -> Accumulator:
        """Return what adds up the gradients of ``micro_batches`` in a step, over all replicas.

        Args:
            micro_batches: in one step.
            exact: whether the sum may depend on nothing but the tensor-parallel size.
            parallel: whether the model is split over ranks, so that a peer's loss can break a backward pass.
        """
        double = gradients.fit_float64(self.tensors)
        if not (exact or parallel or double):
            return gradients.InPlace(self.tensors)
        tied = model.tied_weight(self._model)
        shared = next((i for i, p in enumerate(self._trained) if p is tied), None)
        if not exact:
            return gradients.Apart(self.tensors, dtype=torch.float64 if double else torch.float32, shared=shared)
        # One pipeline stage or two: what the two uses of a weight give is added up in the same way.
        leaf = model.separate_output_weight(self._model)
        leaves = [] if leaf is None or shared is None else [(shared, leaf)]
        return FixedPoint(self.tensors, micro_batches=micro_batches, shared=shared, leaves=leaves)

    def check(self) -> None:
        """Check that backward passes still add to these tensors.

        Raises:
            WrongLoop: they add to others.
        """
        if any(parameter.grad is not tensor for parameter, tensor in self._plain):
            raise WrongLoop("a parameter's .grad was replaced: it must stay the tensor that it is (set none to None)")

    def release(self) -> None:
        """Let go of what Megatron's optimizer leaves in ``.grad``: a backward pass would add to it once more."""
        for parameter in self._model.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.grad = None


def _buffer(parameter: torch.nn.Parameter) -> torch.Tensor:
    found: torch.Tensor | None = getattr(parameter, "main_grad", None)  # of Megatron's DistributedDataParallel
    if found is None:
        found = parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return found


def _do_nothing(*args: Any, **options: Any) -> None:
    """Stand in the place of ``zero_grad``: gradients are cleared with each step."""
