"""Parameters that every tensor-parallel rank has whole, and of whose gradient it computes a part only.

With sequence parallelism each rank computes layer norms, and adds the biases of row-parallel layers, for its part of
the sequence; norms of queries and keys see the heads of their rank. The gradients of such parameters are to be added up
over the tensor-parallel ranks, as Megatron's ``finalize_model_grads`` does.
"""

from __future__ import annotations

from typing import Any

import torch

from unicron.megatron.model import config_of, is_megatron, model_chunks

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
