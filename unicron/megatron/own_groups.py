"""Megatron's process groups, made by their members alone.

Megatron goes through all groups of all ranks on every rank: the ranks of each group are written out, and ``new_group``
is called, a dozen times for each rank of the world. All that the call does for a rank outside of the group is to count,
since the count is the next group's name (``distributed_c10d``, ``_process_group_name`` and
``_new_process_group_helper``, torch 2.9 to 2.13). Here every rank goes through its own groups, and the name has the
number of the call, which is the same on all ranks, and the group's lowest rank. Torch's own way to this end
(``use_local_synchronization``) has in the name how many groups the rank is in already. Ranks of one group differ in
that: only the first and the last pipeline stage are in a group of embeddings.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

INIT_BARRIER = "TORCH_DIST_INIT_BARRIER"
"""Torch's variable for a barrier of all ranks behind each ``new_group``, which ranks outside of it would not reach."""

OF_ALL_RANKS = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
"""Megatron's group that has all ranks, where there is one instance of the distributed optimizer, as here."""

SAME_RANKS = {
    "DATA_PARALLEL_GROUP": "DATA_PARALLEL_GROUP_WITH_CP",
    "EXPERT_DATA_PARALLEL_GROUP": "DATA_PARALLEL_GROUP_WITH_CP",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "TENSOR_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_PARALLEL_GROUP": "TENSOR_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "TENSOR_MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "MODEL_PARALLEL_GROUP",
    "POSITION_EMBEDDING_GROUP": "CONTEXT_PARALLEL_GROUP",
    "EXPERT_MODEL_PARALLEL_GROUP": "CONTEXT_PARALLEL_GROUP",
    "GTP_WEIGHT_REMAT_GROUP": "CONTEXT_PARALLEL_GROUP",
    "EXPERT_GTP_WEIGHT_REMAT_GROUP": "CONTEXT_PARALLEL_GROUP",
}
"""Megatron's description of a group -> that of one with the same ranks in every layout of tensor and pipeline
parallelism. Groups that have the same ranks in some layouts only are not here: the references in a model to a group
that stands for two roles could not be told apart in another layout (``unicron.megatron.group_references``)."""


def own_ranks(sizes: Sequence[int], mask: Sequence[bool], rank: int) -> list[int]:
    """Return a rank's group among those that Megatron's ``generate_masked_orthogonal_rank_groups`` returns.

    Args:
        sizes: of the dimensions of parallelism, the one in which neighbours differ first.
        mask: for each dimension whether the ranks of a group differ in it.
        rank: the rank.
    """
    base, stride, offsets = rank, 1, [0]
    for size, differs in zip(sizes, mask, strict=True):
        if differs:
            base -= rank // stride % size * stride
            offsets = [i * stride + offset for i in range(size) for offset in offsets]
        stride *= size
    return [base + offset for offset in offsets]


@contextlib.contextmanager
def only_own(*, share: bool) -> Iterator[None]:
    """Have Megatron and callers of ``dist.new_group`` make the groups of this rank alone. All ranks enter it together.

    All ranks call ``new_group`` equally often meanwhile, each with a group of its own or one that it is not in; the
    groups of one call have no ranks in common.

    Args:
        share: whether one group stands for all roles that have the same ranks in every layout. Each group of gloo has
            connections to all its peers, threads and a listening socket of its own; NCCL has nothing before the first
            collective.
    """
    from megatron.core import parallel_state

    made: dict[str, Any] = {}
    calls = itertools.count(1)
    world: Any = dist.distributed_c10d._world
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch_new_group, megatrons_ranks = dist.new_group, parallel_state.generate_masked_orthogonal_rank_groups

    def new_group(ranks: Sequence[int], *, group_desc: str | None = None, **options: Any) -> Any:
        world.group_count = next(calls) * world_size + min(ranks)
        if rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        role = SAME_RANKS.get(group_desc or "", group_desc)
        if share and role in made:
            assert dist.get_process_group_ranks(made[role]) == sorted(ranks)
            return made[role]
        group = torch_new_group(ranks, group_desc=group_desc, **options)
        if share and role is not None:
            made[role] = group
        return group

    if share:
        made[OF_ALL_RANKS] = dist.group.WORLD
    torch_distributed: Any = dist
    torch_distributed.new_group = new_group
    parallel_state.generate_masked_orthogonal_rank_groups = lambda size, sizes, mask: [own_ranks(sizes, mask, rank)]
    barrier = os.environ.pop(INIT_BARRIER, None)
    try:
        yield
    finally:
        if barrier is not None:
            os.environ[INIT_BARRIER] = barrier
        parallel_state.generate_masked_orthogonal_rank_groups = megatrons_ranks
        torch_distributed.new_group = torch_new_group
        world.group_count = next(calls) * world_size  # the next name, the same on all ranks


def make_group_of_all(timeout: timedelta) -> None:
    """Make Megatron's group of all ranks, if Megatron has not: it puts it together from the groups of all ranks."""
    from megatron.core import parallel_state

    if parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP is None:
        ranks = range(dist.get_world_size())
        group = parallel_state.create_group(list(ranks), timeout=timeout, group_desc=OF_ALL_RANKS)
        parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = group
