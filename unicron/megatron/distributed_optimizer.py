"""What Megatron's distributed optimizer needs in order to read a checkpoint where torch's Adam counts the steps.

Megatron's own way is for the optimizers of Transformer Engine and Apex, which keep one count for all parameters.
Torch's Adam keeps one count with each parameter, and megatron-core 0.16 then reads none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from unicron.megatron.optimizer import torch_optimizers

ADAM_KINDS = ("exp_avg", "exp_avg_sq")
"""What torch's Adam keeps for each element of a parameter, in float32, beside the count ``step``."""


@contextlib.contextmanager
def reading_counts(optimizer: Any) -> Iterator[None]:
    """Let a checkpoint be read into a distributed optimizer whose state has been allocated.

    Args:
        optimizer: Megatron's.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for one in parts:
        one._set_main_param_and_optimizer_states = _setter(one)
    try:
        yield
    finally:
        for one in parts:
            del one._set_main_param_and_optimizer_states
    for inner in torch_optimizers(optimizer):
        for state in inner.state.values():
            # All parameters share the count that was read, which each parameter's update would then raise.
            state["step"] = state["step"].clone()


def _setter(optimizer: Any) -> Any:
    """Return Megatron's function without the assumption that what was read contains the count of steps."""

    def write(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        state = optimizer._get_main_param_and_optimizer_states(parameter)
        for kind, values in tensors.items():
            state[kind].detach().copy_(values)

    return write
