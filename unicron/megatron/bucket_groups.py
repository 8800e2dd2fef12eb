"""The bucket groups of Megatron's DistributedDataParallel, whose communication this library does itself.

Megatron divides its gradient buffers into buckets, and communicates one *bucket group* at a time: as soon as the last
gradient of the group is added (``overlap_grad_reduce``). With the distributed optimizer each data-parallel rank updates
one equal range of every bucket. Megatron reduces in place and scales by the number of ranks, which destroys the local
sums of gradients; so the methods that do it are replaced here, on the groups of one model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class OwnRange(NamedTuple):
    """One bucket's gradients, and the range of them that this rank's optimizer updates."""

    gradients: torch.Tensor
    """Flat, of the whole bucket; its length is a multiple of the number of ranks."""
    own: torch.Tensor
    """The view of ``gradients`` that the optimizer reads."""


def overlaps_reduction(model: Any) -> bool:
    """Return whether a model is to reduce its gradients beside the backward pass."""
    return bool(getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False))


def bucket_groups(model: Any) -> list[Any]:
    """Return the bucket groups of Megatron's DistributedDataParallel, in an order that is the same on all ranks."""
    return [*model.bucket_groups, *model.expert_parallel_bucket_groups]


def group_of(bucket_group: Any) -> Any:
    """Return the process group over which the gradients of a bucket group are summed.

    To be called for each use: a generation replaces the groups (``unicron.megatron.group_references``).
    """
    return bucket_group.intra_distributed_optimizer_instance_group


def own_ranges(bucket_group: Any) -> list[OwnRange]:
    """Return the buckets of a group of the distributed optimizer."""
    ranks, rank = (
        bucket_group.intra_distributed_optimizer_instance_size,
        bucket_group.intra_distributed_optimizer_instance_rank,
    )
    buckets: list[torch.Tensor] = [bucket.grad_data for bucket in bucket_group.buckets]
    return [OwnRange(gradients, gradients.chunk(ranks)[rank]) for gradients in buckets]


def replace_reduction(bucket_group: Any, added: Callable[[torch.nn.Parameter], None]) -> None:
    """Have Megatron's hooks report each gradient of a bucket group, instead of reducing the group.

    What a script or a schedule calls for the same purpose does nothing from here on, and scales nothing.

    Args:
        bucket_group: Megatron's.
        added: called in each backward pass, once a gradient is added to a parameter's ``main_grad``.
    """

    def register_grad_ready(parameter: torch.nn.Parameter, force_all_reduce: bool | None = False) -> None:
        added(parameter)

    bucket_group.register_grad_ready = register_grad_ready
    bucket_group.start_grad_sync = bucket_group.finish_grad_sync = _do_nothing


def _do_nothing(force_all_reduce: bool | None = False) -> None:
    """Replace a method that reduces gradients in place."""
