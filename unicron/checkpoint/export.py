"""The export of a task's result: the full, unsharded parameters as one safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.checkpoint import parts, storage
from unicron.megatron.model import is_megatron, sharded_parameters

PORTION_BYTES = 256 << 20
"""Bytes of parameters that a rank sends at once: little beside a model, and a second's work on a slow network."""


def export(model: Any, path: Path) -> None:
    """Write the full parameters to a file; all ranks call it, rank 0 writes.

    Raises:
        RuntimeError: a collective failed.
        OSError: the file cannot be written.
    """
    parameters = full_parameters(model)
    if dist.get_rank() == 0:
        write(parameters, path)


def full_parameters(model: Any, progress: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    """Return the full parameters of a model on rank 0, and nothing on the others; all ranks call it.

    Args:
        model: the rank's.
        progress: called once in a while.

    Raises:
        RuntimeError: a collective failed.
    """
    if is_megatron(model):
        return gather_parameters(model, progress)
    return separate(model.state_dict()) if dist.get_rank() == 0 else {}


def write(parameters: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write parameters to a file, which is there whole and durable, or not at all.

    Other threads run meanwhile, however long it takes (``unicron.checkpoint.parts``).

    Raises:
        OSError: it cannot be written.
        UnicronError: the format has no such type of numbers.
    """
    # Larger numbers come first, as the format's library has it: it reads no number that is not aligned.
    ordered = sorted(parameters.items(), key=lambda item: (-item[1].itemsize, item[0]))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in ordered}
    storage.write_aside(str(path), lambda file: parts.write_tensors(file, tensors))


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


def gather_parameters(model: Any, progress: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    """Return the full parameters of a Megatron model on rank 0 (nothing on the others); all ranks call it.

    They travel in portions, so that the time of one does not grow with the model.
    """
    portions = list(_portions(model))
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(portions))
    is_first = dist.get_rank() == 0
    full: dict[str, torch.Tensor] = {}
    for index in range(max(counts)):
        mine = portions[index] if index < len(portions) else []
        gathered: list[Any] = [None] * len(counts) if is_first else []
        dist.gather_object([_piece(shard) for shard in mine], gathered if is_first else None, dst=0)
        for name, shape, offset, size, data in (piece for pieces in gathered for piece in pieces):
            tensor = full.setdefault(name, torch.zeros(shape, dtype=data.dtype))
            view = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
            tensor[view] = data.reshape(size)
        progress()
    return full


def _portions(model: Any) -> Iterator[list[Any]]:
    """Yield the shards that this rank gives, at most ``PORTION_BYTES`` at a time, or a larger one alone."""
    portion: list[Any] = []
    size_bytes = 0
    for shard in sharded_parameters(model):
        if shard.replica_id != 0 and any(shard.replica_id):
            continue
        if portion and size_bytes + shard.data.nbytes > PORTION_BYTES:
            yield portion
            portion, size_bytes = [], 0
        portion.append(shard)
        size_bytes += shard.data.nbytes
    if portion:
        yield portion


def _piece(shard: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.Tensor]:
    shapes = tuple(shard.global_shape), tuple(shard.global_offset), tuple(shard.local_shape)
    # A copy: pickle has all of a buffer for a tensor that is a part of it.
    return (shard.key, *shapes, shard.data.detach().to("cpu", copy=True))
