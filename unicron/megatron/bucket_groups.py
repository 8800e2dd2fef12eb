"""The bucket groups of Megatron's DistributedDataParallel, whose communication this library does itself.

Megatron divides its gradient buffers into buckets, and communicates one *bucket group* at a time: as soon as the last
gradient of the group is added (``overlap_grad_reduce``). With the distributed optimizer each data-parallel rank updates
one equal range of every bucket. Megatron reduces in place and scales by the number of ranks, which destroys the local
sums of gradients; so the methods that reduce are replaced here, on the groups of one model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unicron.megatron.model import model_chunks


class OwnRange(NamedTuple):
    """One bucket's gradients or parameters, and the range of them that this rank's optimizer updates."""

    whole: torch.Tensor
    """The flat tensor; its length is a multiple of the number of ranks."""
    own: torch.Tensor
    """The range, a view of ``whole``."""


def overlaps_gather(model: Any) -> bool:
    """Return whether a model is to gather the parameters that other ranks have updated beside the forward pass."""
    return _overlaps(model, "overlap_param_gather")


def overlaps_reduction(model: Any) -> bool:
    """Return whether a model is to reduce its gradients beside the backward pass."""
    return _overlaps(model, "overlap_grad_reduce")


def _overlaps(model: Any, setting: str) -> bool:
    return bool(getattr(getattr(model_chunks(model)[0], "ddp_config", None), setting, False))


def bucket_groups(model: Any) -> list[Any]:
    """Return the bucket groups of a rank's model, about in the order in which backward passes complete them.

    All ranks with the same shard of the model have the groups in this order.

    Args:
        model: Megatron's DistributedDataParallel, or a list of such model chunks.
    """
    return [
        group
        for chunk in reversed(model_chunks(model))
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]


def group_of(bucket_group: Any) -> Any:
    """Return the process group over which the gradients of a bucket group are summed.

    To be called for each use: a generation replaces the groups (``unicron.megatron.group_references``).
    """
    return bucket_group.intra_distributed_optimizer_instance_group


def own_ranges(bucket_group: Any) -> list[OwnRange]:
    """Return the gradients of each bucket of a group, with the range that this rank updates (distributed optimizer)."""
    return [_own_range(bucket_group, bucket.grad_data) for bucket in bucket_group.buckets]


def own_parameters(bucket_group: Any) -> list[OwnRange]:
    """Return the model's parameters in each bucket of a group, with the range that this rank updates."""
    return [_own_range(bucket_group, bucket.param_data) for bucket in bucket_group.buckets]


def _own_range(bucket_group: Any, whole: torch.Tensor) -> OwnRange:
    ranks, rank = (
        bucket_group.intra_distributed_optimizer_instance_size,
        bucket_group.intra_distributed_optimizer_instance_rank,
    )
    return OwnRange(whole, whole.chunk(ranks)[rank])


def part_in(own: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the part of a parameter's gradient that lies in a rank's own range, as a flat view; None: no part does.

    Args:
        own: the range, of one of Megatron's buffers.
        tensor: the gradient, of any shape.
    """
    if own.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        return None
    offset = own.storage_offset()
    start, stop = max(0, tensor.storage_offset() - offset), tensor.storage_offset() + tensor.numel() - offset
    found = own[start : max(start, stop)]
    return found if found.numel() else None


def replace_reduction(bucket_group: Any, added: Callable[[torch.nn.Parameter], None]) -> None:
    """Have Megatron's hooks report each gradient of a bucket group, instead of reducing the group.

    The methods by which a script or a schedule reduces gradients do nothing from here on, and scale nothing.

    Args:
        bucket_group: Megatron's.
        added: called in each backward pass, once a gradient is added to a parameter's ``main_grad``.
    """

    def register_grad_ready(parameter: torch.nn.Parameter, force_all_reduce: bool | None = False) -> None:
        added(parameter)

    bucket_group.register_grad_ready = register_grad_ready
    bucket_group.start_grad_sync = bucket_group.finish_grad_sync = _do_nothing


def replace_gather(bucket_group: Any, needed: Callable[[], None]) -> None:
    """Have Megatron's hooks say when the parameters of a bucket group are needed, instead of gathering them.

    Args:
        bucket_group: Megatron's.
        needed: called before a forward pass uses them, and where a script asks for whole parameters
            (``start_param_sync(force_sync=True)``).
    """

    def finish_param_sync(skip_next_bucket_dispatch: bool = False) -> None:
        needed()

    def start_param_sync(force_sync: bool = False) -> None:
        if force_sync:
            needed()

    bucket_group.finish_param_sync, bucket_group.start_param_sync = finish_param_sync, start_param_sync


def _do_nothing(force_all_reduce: bool | None = False) -> None:
    """Replace a method that reduces gradients in place."""
