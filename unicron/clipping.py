"""Clipping by the norm of all gradients, the same to the last bit in every data- and pipeline-parallel layout.

Megatron adds up squares in float32, in an order that follows from how parameters lie on ranks. Here the squares of each
tensor are added up in float64 on the rank that holds it, and the sums of all tensors with one rounding: their order
does not matter then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from unicron.runtime import Wait

EPSILON = 1e-6
"""Added to the norm before it divides, as in Megatron and torch."""


def clip(model: Any, limit: float, wait: Wait) -> float:
    """Scale the gradients of a Megatron model so that their norm is at most ``limit``; return the norm before.

    Raises:
        RuntimeError: a collective broke; the gradients are as they were.
    """
    total = norm(model, wait)
    factor = limit / (total + EPSILON)
    if factor < 1.0:
        for parameter in _trained(model):
            parameter.main_grad.mul_(factor)
    return total


def norm(model: Any, wait: Wait) -> float:
    """Return the norm of a Megatron model's gradients, over all its shards.

    Raises:
        RuntimeError: a collective broke.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    squares = [
        parameter.main_grad.to(torch.float64).square().sum()
        for parameter in _trained(model)
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
    ]
    device = next(iter(_trained(model))).main_grad.device
    mine = torch.stack(squares) if squares else torch.zeros(0, dtype=torch.float64, device=device)
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        count = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
        wait(dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group, async_op=True))
        mine = torch.cat([mine, mine.new_zeros(int(count) - mine.numel())])
        gathered = [torch.empty_like(mine) for _ in range(group.size())]
        wait(dist.all_gather(gathered, mine, group=group, async_op=True))
        mine = torch.cat(gathered)
    return math.sqrt(math.fsum(mine.tolist()))


def _trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
