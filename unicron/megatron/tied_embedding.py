"""The weight that a GPT's embedding and output layer share (tied embeddings), and its two gradients."""

from __future__ import annotations

from typing import Any

import torch

from unicron.megatron.model import model_chunks, unwrapped


def tied_weight(model: Any) -> torch.nn.Parameter | None:
    """Return the weight that embedding and output layer share; None if this rank has no such weight.

    Where there are several chunks, the first may contain the embedding and the last the output layer; over pipeline
    stages, no rank has both.
    """
    for chunk in model_chunks(model):
        module = unwrapped(chunk)
        if getattr(module, "share_embeddings_and_output_weights", False):
            weight: torch.nn.Parameter | None = module.shared_embedding_or_output_weight()
            if weight is not None:
                return weight
    return None


def tied_group(model: Any) -> Any:
    """Return the group of the two pipeline stages that each have a copy of the shared weight; None for one stage."""
    if tied_weight(model) is None:
        return None
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return None
    return parallel_state.get_embedding_group()


def separate_output_weight(model: Any) -> torch.Tensor | None:
    """Let the output layer use the shared weight under another name, which separates its gradient from the other use's.

    Returns:
        The tensor to which the output layer's gradients are added; None if this rank does not use the weight twice.
    """
    weight = tied_weight(model)
    module = next((m for m in map(unwrapped, model_chunks(model)) if weight is not None and m.pre_process), None)
    if module is None or weight is None or not module.post_process:
        return None
    alias = weight.detach().requires_grad_()
    alias.grad = torch.zeros_like(alias)

    def replace(layer: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        alias.data = weight.data
        return arguments, keywords | {"weight": alias}

    module.output_layer.register_forward_pre_hook(replace, with_kwargs=True)
    return alias.grad
