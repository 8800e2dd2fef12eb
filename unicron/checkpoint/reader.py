"""Reading of persistent checkpoints: the named one or, if it is damaged, the newest other one, in any layout."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron import device
from unicron.checkpoint import archive, plain
from unicron.errors import DamagedCheckpoint
from unicron.megatron import distributed_checkpoint
from unicron.megatron.distributed_optimizer import ADAM_KINDS, reading_counts
from unicron.megatron.model import is_megatron
from unicron.state.chunks import StateKind, required_chunks
from unicron.state.rank_state import RankState


def restore(rank_state: RankState, named: Path) -> Path:
    """Read the named checkpoint or, if it is damaged, the newest other one; all ranks call it.

    Returns:
        The one that was read.

    Raises:
        DamagedCheckpoint: no checkpoint is intact.
    """
    for path in candidates(named):
        if is_intact(path):
            load(rank_state, path)
            return path
    raise DamagedCheckpoint(f"{named} is damaged, and there is no other")


def candidates(named: Path) -> list[Path]:
    """Return the checkpoints to try: the named one, then its task's others, the newest first; all ranks call it."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        others = archive.published(named)
        found = [[str(named), *(str(p) for p in others if p.resolve() != named.resolve())]]
    dist.broadcast_object_list(found, src=0)
    return [Path(p) for p in found[0]]


def newest_step(named: Path) -> int:
    """Return the step of the checkpoint that ``restore`` tries first; 0 if there is none."""
    for path in [named, *archive.published(named)]:
        with contextlib.suppress(DamagedCheckpoint):
            return archive.read(path).step
    return 0


def is_intact(path: Path) -> bool:
    """Check a checkpoint against its checksums, each rank its share of the files; all ranks call it."""
    reason = ""
    try:
        archive.verify(path, dist.get_rank(), dist.get_world_size())
    except DamagedCheckpoint as err:
        reason = str(err)
        print(f"unicron: warning: {reason}; trying another", file=sys.stderr, flush=True)
    damaged = torch.tensor(int(bool(reason)), device=device.current())
    dist.all_reduce(damaged, op=dist.ReduceOp.MAX)
    return int(damaged) == 0


def load(rank_state: RankState, path: Path) -> None:
    """Read a checkpoint, in whatever layout it was written; all ranks call it.

    Raises:
        OSError, RuntimeError: it cannot be read.
    """
    if not is_megatron(rank_state.model):
        position = plain.load(rank_state, path)
    elif not rank_state.is_distributed:
        position = distributed_checkpoint.load(rank_state.model, rank_state.optimizer, path)
    else:
        _allocate_adam(rank_state)
        with reading_counts(rank_state.optimizer):
            position = distributed_checkpoint.load(rank_state.model, rank_state.optimizer, path)
    rank_state.set_version(int(position["step"]), bytes.fromhex(position["digest"]))


def _allocate_adam(rank_state: RankState) -> None:
    """Allocate the state of torch's Adam: Megatron reads into tensors, and before the first step there are none."""
    kinds = {kind: StateKind(None, "float32") for kind in ADAM_KINDS} | {"step": StateKind((), "float32")}
    shards = rank_state.tensors.shards
    rank_state.tensors.allocate(required_chunks(shards, {shard.name: kinds for shard in shards}))
