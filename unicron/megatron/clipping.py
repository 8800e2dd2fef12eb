"""Clipping by the norm of all gradients, with the same bits in every data- and pipeline-parallel layout.

Megatron adds squares up in float32, in an order that depends on the layout. Here the rank that has a tensor adds up the
squares of the tensor in float64. The sums of all tensors are then added with a single rounding (``math.fsum``), so that
their order does not matter.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from unicron.link.waiting import Wait
from unicron.megatron.bucket_groups import part_in
from unicron.megatron.model import gradient_of, parameters

EPSILON = 1e-6
"""The number that is added to the norm in the denominator, as in Megatron and torch."""


def clip(model: Any, limit: float, wait: Wait, own: list[torch.Tensor] | None = None) -> float:
    """Scale the gradients of a model so that their norm is at most ``limit``; return the norm before.

    All ranks of a model-parallel group call it.

    Args:
        model: Megatron's DistributedDataParallel, a list of such model chunks, or a plain module.
        limit: the largest norm.
        wait: waits for a collective.
        own: the gradients that this rank alone has reduced, where the data-parallel ranks divide them; None: every rank
            has the gradients of its whole shard of the model.

    Raises:
        RuntimeError: a collective broke; the gradients are as they were.
    """
    total = norm(model, wait, own)
    factor = limit / (total + EPSILON)
    if factor < 1.0:
        scale(model, factor, own)
    return total


def scale(model: Any, factor: float, own: list[torch.Tensor] | None = None) -> None:
    """Multiply the gradients of a model, or those that this rank alone has reduced, by a factor."""
    for gradient in own if own is not None else [gradient_of(parameter) for parameter in _trained(model)]:
        gradient.mul_(factor)


def norm(model: Any, wait: Wait, own: list[torch.Tensor] | None = None) -> float:
    """Return the L2 norm of a model's gradients, over all shards of the model. Tied weights count once.

    Args:
        model: as for ``clip``.
        wait: waits for a collective.
        own: as for ``clip``.

    Raises:
        RuntimeError: a collective broke.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    gradients = [
        gradient_of(parameter)
        for parameter in _trained(model)
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
    ]
    if own is not None:
        gradients = [part for one in gradients for mine in own if (part := part_in(mine, one)) is not None]
    tensor_sums = [gradient.to(torch.float64).square().sum() for gradient in gradients]
    device = gradient_of(next(iter(_trained(model)))).device
    sums = torch.stack(tensor_sums) if tensor_sums else torch.zeros(0, dtype=torch.float64, device=device)
    group = parallel_state.get_model_parallel_group() if own is None else dist.group.WORLD
    assert group is not None
    if group.size() > 1:
        count = torch.tensor([sums.numel()], dtype=torch.int64, device=device)
        wait(dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group, async_op=True))
        sums = torch.cat([sums, sums.new_zeros(int(count) - sums.numel())])
        gathered = [torch.empty_like(sums) for _ in range(group.size())]
        wait(dist.all_gather(gathered, sums, group=group, async_op=True))
        sums = torch.cat(gathered)
    return math.sqrt(math.fsum(sums.tolist()))


def _trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in parameters(model) if parameter.requires_grad]
