"""What two pipeline stages send each other: Megatron sends one of the two directions over the group of all ranks.

Each of the two stages is both the next and the previous one of the other. For both directions to be under way at once,
each direction needs a group of its own. For the second direction Megatron takes the default group (``_p2p_ops`` in its
``p2p_communication``), which has ranks of other replicas, and which every fault breaks off. Here the second direction
gets one more group of the same two ranks. A hold spares it like the first (``unicron.link.sparing``).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_megatrons_own: Any = None
"""Megatron's own function, kept while another one is in its place; else None."""

_second: dist.ProcessGroup | None = None
"""This rank's group of the second direction, if there is one."""


def second_group() -> dist.ProcessGroup | None:
    """Return this rank's group of the second direction; None: there is none."""
    return _second


def make(timeout: timedelta) -> None:
    """Make the groups of the second direction, and have Megatron's pipelines of two stages use this rank's.

    All ranks call it, each for its own pipeline (``unicron.megatron.own_groups``), when Megatron's groups exist. With
    another number of stages it does nothing.

    Args:
        timeout: of the groups.
    """
    global _megatrons_own, _second
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() != 2:
        return
    from megatron.core.pipeline_parallel import p2p_communication

    own = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    _second = dist.new_group(own, timeout=timeout)
    megatron: Any = p2p_communication
    _megatrons_own = _megatrons_own or megatron._p2p_ops
    megatron._p2p_ops = partial(_begin, _second)


def drop() -> None:
    """Put Megatron's function back: the one in its place refers to a group."""
    global _megatrons_own, _second
    _second = None
    if _megatrons_own is not None:
        from megatron.core.pipeline_parallel import p2p_communication

        megatron: Any = p2p_communication
        megatron._p2p_ops, _megatrons_own = _megatrons_own, None


def _begin(
    second: dist.ProcessGroup,
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
    group: dist.ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    """Begin what Megatron's ``_p2p_ops`` begins, in the same order.

    Args:
        second: the group over which the second stage sends and the first one receives.
        tensor_send_prev: what goes to the previous stage; None: nothing does. None means the same below.
        tensor_recv_prev: what the previous stage sends goes here.
        tensor_send_next: what goes to the next stage.
        tensor_recv_next: what the next stage sends goes here.
        group: of the pipeline.
        prev_pipeline_rank: the rank of the previous stage.
        next_pipeline_rank: the rank of the next stage.

    Returns:
        Torch's ``Work`` of each send and receive.
    """
    is_first = group.rank() == 0
    sends, receives = (group, second) if is_first else (second, group)
    begun: list[tuple[str, torch.Tensor | None, Callable[[torch.Tensor], Any]]] = [
        ("send_next", tensor_send_next, lambda t: dist.isend(t, next_pipeline_rank, sends)),
        ("recv_prev", tensor_recv_prev, lambda t: dist.irecv(t, prev_pipeline_rank, receives)),
        ("send_prev", tensor_send_prev, lambda t: dist.isend(t, prev_pipeline_rank, sends)),
        ("recv_next", tensor_recv_next, lambda t: dist.irecv(t, next_pipeline_rank, receives)),
    ]
    if not is_first:
        begun = [begun[i] for i in (1, 0, 3, 2)]
    return {name: begin(tensor) for name, tensor, begin in begun if tensor is not None}
