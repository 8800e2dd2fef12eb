"""Names of parts of a state that stay the same in every layout: chunks of global tensors. Pure.

A *chunk* is a rectangular shard of a global tensor (tensor and pipeline parallelism cut tensors and layers) or, with
Megatron's distributed optimizer, a flat range of such a shard. Two ranks that have the same chunk of the same version
have the same numbers, whatever layout each trains in. ``unicron.state.tensors`` finds the chunks in a rank's memory,
and ``unicron.state.transfer_plan`` plans which rank gives which part of a chunk to which other rank.

Keys: ``parameter/<name>`` (weights, and buffers that a checkpoint would contain) and ``optimizer/<name>/<kind>`` (one
for each kind of state that the optimizer keeps for a parameter: ``exp_avg``, ``step``, ...). Names are those of
Megatron's sharded state dict, or a plain module's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

PARAMETER, OPTIMIZER = "parameter", "optimizer"
"""The first component of a chunk's key."""

MAIN = "main_param"
"""The kind of the float32 copy that an optimizer keeps of a half-precision parameter."""


class StateChunk(NamedTuple):
    """A part of a global tensor."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Where the shard begins in the global tensor."""
    shape: tuple[int, ...]
    """The shard's extent."""
    start: int
    stop: int
    """The range of the flattened shard that the chunk covers; 0 and the number of elements for the whole shard."""
    dtype: str
    """The type of numbers as torch names it, without ``torch.``."""

    @property
    def is_whole(self) -> bool:
        """Whether the chunk covers the whole shard."""
        return self.stop - self.start == math.prod(self.shape)

    @property
    def is_optimizer_state(self) -> bool:
        """Whether the chunk belongs to the optimizer's state."""
        return self.key.startswith(f"{OPTIMIZER}/")

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.key.split("/")[1]

    @property
    def kind(self) -> str:
        """The kind of the optimizer's state; for a parameter its name."""
        return self.key.rsplit("/", 1)[1]

    @property
    def bytes(self) -> int:
        """Size of the chunk."""
        return (self.stop - self.start) * dtype_of(self.dtype).itemsize


class ParameterShard(NamedTuple):
    """A shard of one parameter or persistent buffer with which a rank computes."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    """The range of the flattened shard that this rank's optimizer updates."""
    is_updated: bool
    """Whether this rank's optimizer updates any of it."""

    @property
    def size(self) -> int:
        """Number of elements."""
        count: int = math.prod(self.shape)
        return count


class StateKind(NamedTuple):
    """One kind of state that an optimizer keeps for a parameter."""

    shape: tuple[int, ...] | None
    """Shape of the state; None: the parameter's."""
    dtype: str


StateKinds = dict[str, dict[str, StateKind]]
"""Parameter name -> name of the kind -> the kind."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


def state_kinds(available: Iterable[StateChunk], *, distributed: bool) -> StateKinds:
    """Return the kinds of optimizer state that occur among some chunks.

    Args:
        available: chunks of one version, from any ranks.
        distributed: whether data-parallel ranks divide the optimizer's state. The state of a parameter may then be
            missing from ``available`` although it exists (its only owner is lost), so every parameter is assumed to
            have all the kinds that any parameter has.
    """
    listed = list(available)
    shapes = {chunk.name: chunk.global_shape for chunk in listed if not chunk.is_optimizer_state}
    found: StateKinds = {name: {} for name in shapes}
    every: dict[str, StateKind] = {}
    for chunk in listed:
        if chunk.is_optimizer_state:
            # A number stays a number, also where the parameter is a number itself.
            like_parameter = chunk.global_shape == shapes.get(chunk.name) != ()
            kind = StateKind(None if like_parameter else chunk.global_shape, chunk.dtype)
            every[chunk.kind] = found.setdefault(chunk.name, {})[chunk.kind] = kind
    return dict.fromkeys(found, every) if distributed else found


def required_chunks(shards: Iterable[ParameterShard], kinds: StateKinds) -> list[StateChunk]:
    """Return the chunks that a rank with these shards needs, in a fixed order."""
    required = []
    for shard in shards:
        location = (shard.global_shape, shard.offset, shard.shape)
        required.append(StateChunk(f"{PARAMETER}/{shard.name}", *location, 0, shard.size, shard.dtype))
        if not shard.is_updated:
            continue
        for name, kind in sorted(kinds.get(shard.name, {}).items()):
            key = f"{OPTIMIZER}/{shard.name}/{name}"
            if kind.shape is None:
                required.append(StateChunk(key, *location, shard.start, shard.stop, kind.dtype))
            else:
                required.append(undivided(key, kind.shape, kind.dtype))
    return required


def undivided(key: str, shape: tuple[int, ...], dtype: str) -> StateChunk:
    """Return the chunk that is a whole global tensor."""
    size: int = math.prod(shape)
    return StateChunk(key, shape, (0,) * len(shape), shape, 0, size, dtype)
