"""The export of a task's result: the full, unsharded parameters as one safetensors file."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.megatron.model import is_megatron, sharded_parameters


def export(model: Any, path: Path) -> None:
    """Write the full parameters to a file; all ranks call it, rank 0 writes.

    Raises:
        RuntimeError: a collective failed.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    full = gather_parameters(model) if is_megatron(model) else model.state_dict()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.touch()
        mode = stat.S_IMODE(partial.stat().st_mode)
        save_file(separate(full), str(partial))
        partial.chmod(mode)  # from 0600, safetensors' own: the agent reads it, which may be another user
        os.replace(partial, path)


def separate(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dictionary, none of which shares memory with another.

    A tied weight is so in the file under each of its names, and ``load_state_dict`` finds them all; safetensors refuses
    tensors that share memory.
    """
    found: dict[str, torch.Tensor] = {}
    storages = set()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's extra state, which is no part of the state of a task
        tensor = value.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return found


def gather_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return the full parameters of a Megatron model on rank 0 (nothing on the others); all ranks call it."""
    mine = [
        (shard.key, tuple(shard.global_shape), tuple(shard.global_offset), tuple(shard.local_shape), shard.data.cpu())
        for shard in sharded_parameters(model)
        if shard.replica_id == 0 or not any(shard.replica_id)
    ]
    gathered: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(mine, gathered if dist.get_rank() == 0 else None, dst=0)
    full: dict[str, torch.Tensor] = {}
    for of_rank in gathered:
        for name, shape, offset, size, data in of_rank:
            tensor = full.setdefault(name, torch.zeros(shape, dtype=data.dtype))
            view = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
            tensor[view] = data.reshape(size)
    return full
