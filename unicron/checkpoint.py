"""Checkpoints and results, written by all ranks and complete or absent.

A checkpoint is written under a temporary name and renamed by rank 0 when every rank has written its part, so that a
folder with the final name is always complete. A Megatron model's can be read in another layout.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.model import checkpoint_metadata, sharded_parameters
from unicron.replica import Replica

PLAIN_FILE = "state.pt"
"""What the checkpoint of a model that is not Megatron's holds: one file, written by rank 0."""


def _is_sharded(replica: Replica) -> bool:
    return hasattr(getattr(replica.model, "module", None), "sharded_state_dict")


def _state(replica: Replica, *, loading: bool) -> dict[str, Any]:
    metadata = checkpoint_metadata()
    model = replica.model.module.sharded_state_dict(metadata=metadata)
    optimizer = replica.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def save(replica: Replica, path: Path) -> None:
    """Write a checkpoint; all ranks call it and all return when it is complete.

    Raises:
        RuntimeError: a collective failed; the folder does not exist then.
    """
    from megatron.core import dist_checkpointing

    partial = path.with_name(f".{path.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    position = {"step": replica.applied, "digest": replica.digest.hex()}
    if _is_sharded(replica):
        dist_checkpointing.save(_state(replica, loading=False) | position, str(partial))
    elif dist.get_rank() == 0:
        state = {"model": replica.model.state_dict(), "optimizer": replica.optimizer.state_dict()}
        torch.save(state | position, partial / PLAIN_FILE)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    dist.barrier()


def load(replica: Replica, path: Path) -> None:
    """Read a checkpoint, in whatever layout it was written; all ranks call it.

    Raises:
        OSError, RuntimeError: it cannot be read.
    """
    from megatron.core import dist_checkpointing

    if _is_sharded(replica):
        state = dist_checkpointing.load(_state(replica, loading=True), str(path))
        replica.model.module.load_state_dict(state["model"])
    else:
        state = torch.load(path / PLAIN_FILE, map_location="cpu")
        replica.model.load_state_dict(state["model"])
    replica.optimizer.load_state_dict(state["optimizer"])
    replica.hold(int(state["step"]), bytes.fromhex(state["digest"]))


def gather(replica: Replica) -> dict[str, torch.Tensor]:
    """Return the full, unsharded parameters on rank 0 (nothing on the others); all ranks call it."""
    pieces = [
        (name, tuple(shard.global_shape), tuple(shard.global_offset), tuple(shard.local_shape), shard.data.cpu())
        for name, shard in sharded_parameters(replica.model).items()
        if shard.replica_id == 0 or not any(shard.replica_id)
    ]
    gathered: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(pieces, gathered if dist.get_rank() == 0 else None, dst=0)
    full: dict[str, torch.Tensor] = {}
    for rank_pieces in gathered:
        for name, shape, offset, size, data in rank_pieces:
            tensor = full.setdefault(name, torch.zeros(shape, dtype=data.dtype))
            view = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
            tensor[view] = data.reshape(size)
    return full


def export(replica: Replica, path: Path) -> None:
    """Write the full, unsharded parameters as a safetensors file; all ranks call it, rank 0 writes."""
    from safetensors.torch import save_file

    full = gather(replica) if _is_sharded(replica) else replica.model.state_dict()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        save_file({k: v.contiguous() for k, v in full.items()}, str(partial))
        os.replace(partial, path)
