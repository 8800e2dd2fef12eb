"""This rank's place in Megatron's process groups (``megatron.core.parallel_state``)."""

from __future__ import annotations

from typing import Any, NamedTuple


def data_group() -> Any:
    """Return the process group of the ranks that have the same shard of the model: the data-parallel group."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def model_coordinate() -> tuple[int, int]:
    """Return this rank's tensor-parallel and pipeline-parallel rank: which shard of the model the rank has."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()


def model_ranks() -> list[int]:
    """Return the ranks of this rank's data-parallel replica, which together have the model once."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    return list(dist.get_process_group_ranks(parallel_state.get_model_parallel_group()))


def last_stage() -> int:
    """Return the pipeline-parallel rank of the last stage, which computes the loss."""
    from megatron.core import parallel_state

    last: int = parallel_state.get_pipeline_model_parallel_world_size() - 1
    return last


def virtual_stages() -> int:
    """Return how many model chunks each rank has: 1, or Megatron's virtual pipeline size in an interleaved pipeline."""
    from megatron.core import parallel_state

    return parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1


class Place(NamedTuple):
    """The place for which a rank's model and optimizer are built: the layout, and the rank's place in it."""

    tensor: int
    pipeline: int
    coordinate: tuple[int, int]
    """Tensor- and pipeline-parallel rank."""
    chunks: int
    """Model chunks of each rank: 1, or more in an interleaved pipeline."""
    data: tuple[int, int] | None
    """Data-parallel size and rank, if data-parallel ranks divide the optimizer's state."""

    def has_shard_of(self, other: Place) -> bool:
        """Return whether both places compute with the same shard of the model."""
        return self._replace(data=None) == other._replace(data=None)


def place(layout: tuple[int, int], *, distributed: bool) -> Place:
    """Return this rank's place in the present process groups.

    Args:
        layout: tensor- and pipeline-parallel size.
        distributed: whether data-parallel ranks divide the optimizer's state among them.
    """
    group = data_group()
    divided = (group.size(), group.rank()) if distributed else None
    return Place(*layout, model_coordinate(), virtual_stages(), divided)
