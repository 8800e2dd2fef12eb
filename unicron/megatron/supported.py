"""Checks of the model and the optimizer that a user's ``build`` returns.

This library reduces the gradients over data-parallel ranks, out of place, in a step that may lose and regain ranks.
Megatron's own reductions and scalings at the end of a step (``finalize_model_grads``) do not run. Settings that rely on
them would train to a wrong result without an error, and are refused before training begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from unicron.errors import UnsupportedModel
from unicron.megatron.model import is_megatron
from unicron.megatron.optimizer import torch_optimizers


def check(model: Any, optimizer: Any, tensor: int, pipeline: int) -> None:
    """Check that a model and its optimizer train to the right result.

    Args:
        model: as ``build`` returned it.
        optimizer: as ``build`` returned it.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.

    Raises:
        UnsupportedModel: they would not; the message names the setting and its allowed values.
    """
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedModel(f"model: must be one module, not {type(model).__name__} (no interleaved pipeline)")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UnsupportedModel("model: DistributedDataParallel of torch reduces gradients itself; return what it wraps")
    if is_megatron(model):
        found = next(_refused(model.config, model.ddp_config, tensor), "")
        if found:
            raise UnsupportedModel(found)
    elif hasattr(model, "sharded_state_dict"):
        raise UnsupportedModel("model: must be wrapped in Megatron's DistributedDataParallel")
    elif (tensor, pipeline) != (1, 1):
        raise UnsupportedModel(
            f"model: a module without Megatron's sharded_state_dict cannot be split over tensor={tensor}, "
            f"pipeline={pipeline}; set parallel.tensor and parallel.pipeline to 1"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training and module.track_running_stats:
            raise UnsupportedModel(
                f"model: {name or 'it'} is a batch norm that trains; its running statistics depend on which process "
                "computes what, and how often"
            )
    if not torch_optimizers(optimizer):
        raise UnsupportedModel(f"optimizer: {type(optimizer).__name__} contains no torch optimizer")


def _refused(config: Any, ddp: Any, tensor: int) -> Iterator[str]:
    """Yield a message for each setting of a Megatron model that would train to a wrong result.

    Args:
        config: the model's TransformerConfig.
        ddp: its DistributedDataParallelConfig.
        tensor: tensor-parallel size.
    """
    for name in ("overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp"):
        if getattr(ddp, name, False):
            yield f"DistributedDataParallelConfig.{name}: must be False; step.reduce() reduces the gradients"
    if getattr(config, "finalize_model_grads_func", None) is not None:
        yield "TransformerConfig.finalize_model_grads_func: must be None; step.reduce() takes its place"
    if not getattr(config, "calculate_per_token_loss", True):
        yield (
            "TransformerConfig.calculate_per_token_loss: must be True; else Megatron's schedules divide the loss by "
            "the micro-batches of the call, whose number changes when a rank is lost"
        )
    if getattr(config, "fp16", False):
        yield "TransformerConfig.fp16: must be False; a dynamic loss scale is no part of the state (bf16 needs none)"
    for name in ("context_parallel_size", "expert_model_parallel_size"):
        if getattr(config, name, 1) != 1:
            yield f"TransformerConfig.{name}: must be 1, not {getattr(config, name)}"
    for name in ("sequence_parallel", "qk_layernorm"):
        if tensor > 1 and getattr(config, name, False):
            yield f"TransformerConfig.{name}: must be False with tensor={tensor}; its gradients need one more sum"
    if getattr(config, "num_moe_experts", None):
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            value = getattr(config, name, None)
            if any(value) if isinstance(value, list) else value:
                yield f"TransformerConfig.{name}: must be 0; Megatron scales that loss by tokens that nothing divides"
