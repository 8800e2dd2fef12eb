"""The losses of micro-batches: on a device they stay there until the ranks agree on the step, and are read all at once.

To read a loss makes the host wait until the device has computed it, and the device then wait until the host has issued
the next micro-batch. So nothing reads a loss before the passes of a step are done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from unicron.errors import WrongLoop

Key = TypeVar("Key")

Loss = float | torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A mean loss, as a number or as a tensor of one element; or a sum over tokens, and their number."""


def noted(loss: Loss) -> float | torch.Tensor:
    """Return a loss as it is to be kept: a number, or a tensor of its own without dimensions, of type float64.

    Whatever the training loop does to its tensor afterwards (Megatron's schedules divide it in place) does not matter.

    Raises:
        WrongLoop: a tensor has another number of elements than one.
    """
    if isinstance(loss, torch.Tensor):
        return _scalar(loss).clone() if loss.dtype == torch.float64 else _scalar(loss)
    if isinstance(loss, tuple):
        total, tokens = loss
        return _scalar(total) / _scalar(tokens).clamp(min=1.0)  # as in Megatron: all tokens may be masked
    return float(loss)


def tokens_of(loss: Loss) -> torch.Tensor | None:
    """Return the number of tokens that a loss is a sum over, to be kept; None: it is a mean.

    Raises:
        WrongLoop: the number is a tensor of another number of elements than one.
    """
    return _scalar(loss[1]).clone() if isinstance(loss, tuple) else None


def _scalar(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() != 1:
        raise WrongLoop(
            f"the loss given to step.commit has shape {list(tensor.shape)}: a tensor of one element is needed"
        )
    return tensor.detach().reshape(()).to(torch.float64)


def read(losses: Mapping[Key, Any]) -> dict[Key, float]:
    """Return losses (by micro-batch) as numbers: those that are tensors are copied to the host together."""
    tensors = {k: loss for k, loss in losses.items() if isinstance(loss, torch.Tensor)}
    values = torch.stack(list(tensors.values())).tolist() if tensors else []
    return {**losses, **dict(zip(tensors, values, strict=True))}
