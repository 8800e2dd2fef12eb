"""What Megatron's distributed optimizer needs to read a checkpoint where torch's Adam counts the steps.

Its own way is for the optimizers of Transformer Engine and Apex, which keep one count for all parameters; torch's keeps
one with each, and megatron-core 0.16 then reads none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from unicron.pieces import allocate, is_sharded, needed, torch_optimizers
from unicron.replica import Replica

ADAM = {"exp_avg": (None, "float32"), "exp_avg_sq": (None, "float32"), "step": ((), "float32")}
"""What torch's Adam keeps for a parameter, from its first step on."""


@contextlib.contextmanager
def loading(replica: Replica) -> Iterator[None]:
    """Let a checkpoint be read into a replica; does nothing unless the optimizer's state is divided."""
    if not is_sharded(replica.model):
        yield
        return
    # Megatron reads into what there is, and before the first step there is nothing.
    shards = [part.shard for part in replica.parts]
    allocate(replica, needed(shards, {shard.name: dict(ADAM) for shard in shards}))
    parts = getattr(replica.optimizer, "chained_optimizers", [replica.optimizer])
    for one in parts:
        one._set_main_param_and_optimizer_states = _setter(one)
    try:
        yield
    finally:
        for one in parts:
            del one._set_main_param_and_optimizer_states
    for inner in torch_optimizers(replica.optimizer):
        for state in inner.state.values():
            # All share the one that was read, which each parameter's update would then raise.
            state["step"] = state["step"].clone()


def _setter(optimizer: Any) -> Any:
    """Return Megatron's function without the assumption that what was read holds the count of steps."""

    def write(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        held = optimizer._get_main_param_and_optimizer_states(parameter)
        for kind, values in tensors.items():
            held[kind].detach().copy_(values)

    return write
