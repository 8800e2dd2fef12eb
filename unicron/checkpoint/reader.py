"""Reading of persistent checkpoints: the named one or, if it is damaged, the newest other one, in any layout.

A checkpoint contains the chunks of the state (``unicron.state.chunks``). Each rank reads the boxes that it needs of
them, whatever layout they were written in.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from unicron import device
from unicron.checkpoint import archive, parts, storage
from unicron.checkpoint.archive import Manifest
from unicron.errors import DamagedCheckpoint
from unicron.state.boxes import view_of_box
from unicron.state.chunks import StateChunk, required_chunks, state_kinds
from unicron.state.rank_state import RankState
from unicron.state.transfer_plan import Transfer, plan_transfers
from unicron.state.user_chunks import DOCUMENT, AllocatedTensors, NamedShards, is_users


def restore(rank_state: RankState, named: str) -> str:
    """Read the named checkpoint or, if it is damaged, the newest other one; all ranks call it.

    Returns: The checkpoint that was read.

    Raises:
        DamagedCheckpoint: no checkpoint is intact.
    """
    reason = ""
    for location in candidates(named):
        damage = damage_of(location)
        if damage is None:
            load(rank_state, location)
            return location
        reason = reason or damage
    raise DamagedCheckpoint(f"{named} cannot be read, and there is no other{reason and f': {reason}'}")


def candidates(named: str) -> list[str]:
    """Return the checkpoints to try: the named one, then its task's others, the newest first; all ranks call it."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        others = archive.published(named)
        found = [[named, *(p for p in others if storage.canonical(p) != storage.canonical(named))]]
    dist.broadcast_object_list(found, src=0)
    return list(found[0])


def newest_step(named: str) -> int:
    """Return the step of the checkpoint that ``restore`` tries first; 0 if there is none."""
    for location in [named, *archive.published(named)]:
        with contextlib.suppress(DamagedCheckpoint):
            return archive.read(location).step
    return 0


def order_samples(named: str) -> int:
    """Return the number of samples from which the order was drawn, by ``restore``'s first checkpoint; 0: unknown."""
    for location in [named, *archive.published(named)]:
        with contextlib.suppress(DamagedCheckpoint):
            return archive.read(location).order_samples
    return 0


def damage_of(location: str) -> str | None:
    """Check a checkpoint against its checksums, each rank its share of the files; all ranks call it.

    Returns: None if it is intact; else what is wrong, empty if only another rank knows that.
    """
    reason = ""
    try:
        archive.verify(location, dist.get_rank(), dist.get_world_size())
    except DamagedCheckpoint as err:
        reason = str(err)
        print(f"unicron: warning: {reason}; trying another", file=sys.stderr, flush=True)
    damaged = torch.tensor(int(bool(reason)), device=device.current())
    dist.all_reduce(damaged, op=dist.ReduceOp.MAX)
    return None if int(damaged) == 0 else reason


def load(rank_state: RankState, location: str) -> None:
    """Read a checkpoint, in whatever layout it was written; all ranks call it.

    Raises:
        OSError: the checkpoint cannot be read.
        DamagedCheckpoint: it lacks a part of the state.
    """
    manifest = archive.read(location)
    chunks = [chunk for file in manifest.files.values() for chunk in file.chunks.values()]
    # All chunks that there are: none is lost with its owner, as a chunk in memory may be.
    kinds = state_kinds((chunk for chunk in chunks if not is_users(chunk)), distributed=False)
    required = required_chunks(rank_state.tensors.shards, kinds)
    plan = plan_transfers([required], [[(chunk, manifest.step) for chunk in chunks]], manifest.step)
    if plan is None:
        raise DamagedCheckpoint(f"{location}: lacks a part of this model's state")
    rank_state.invalidate()
    rank_state.tensors.allocate(required)
    _read(rank_state.tensors.chunks(), location, manifest, plan, required)
    rank_state.set_version(manifest.step, bytes.fromhex(manifest.digest))
    rank_state.tensors.count_steps(manifest.step)


def load_user_state(shards: NamedShards, location: str) -> tuple[bytes, AllocatedTensors]:
    """Read the user's state from a checkpoint, in whatever layout it was written.

    Args:
        shards: the shards that this rank needs of tensors that are like parameters.
        location: the checkpoint.

    Returns: The packed record (empty: the checkpoint has no such state), and the tensors that are like parameters.

    Raises:
        OSError: it cannot be read.
        DamagedCheckpoint: it lacks a part of that state.
    """
    manifest = archive.read(location)
    chunks = [chunk for file in manifest.files.values() for chunk in file.chunks.values()]
    document = next((chunk for chunk in chunks if chunk.key == DOCUMENT), None)
    if document is None:
        return b"", AllocatedTensors()
    required = shards.required(chunk for chunk in chunks if is_users(chunk) and chunk != document)
    allocated = shards.allocate(required)
    required = [document, *required]
    plan = plan_transfers([required], [[(chunk, manifest.step) for chunk in chunks]], manifest.step)
    if plan is None:
        raise DamagedCheckpoint(f"{location}: lacks a part of the state that the script gives to attach")
    content = torch.empty(document.shape, dtype=torch.uint8)
    _read({**allocated.chunks, document: content}, location, manifest, plan, required)
    return content.numpy().tobytes(), allocated


def _read(
    into: Mapping[StateChunk, torch.Tensor],
    location: str,
    manifest: Manifest,
    plan: list[Transfer],
    required: list[StateChunk],
) -> None:
    """Read the planned boxes into required chunks, one file after the other."""
    wanted: dict[int, list[Transfer]] = {}
    for one in plan:
        wanted.setdefault(one.given, []).append(one)
    index = 0
    for name, file in manifest.files.items():
        numbers = range(index, index + len(file.chunks))
        index = numbers.stop
        if not any(number in wanted for number in numbers):
            continue
        with parts.reading(f"{location}/{name}") as tensor:
            for number, (key, chunk) in zip(numbers, file.chunks.items(), strict=True):
                values = tensor(key) if number in wanted else None
                for one in wanted.get(number, []):
                    assert values is not None
                    target = required[one.required]
                    view_of_box(target, into[target], one.box).copy_(view_of_box(chunk, values, one.box))
