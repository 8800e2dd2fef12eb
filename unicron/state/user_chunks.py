"""Tensors of the user's state that are like parameters (an average of the weights) as chunks of global tensors.

Such a tensor stands in its state dict under the name of a parameter or persistent buffer, and has its shape. It then
moves between layouts as the parameter does. Keys: ``state/<name>/<path>``, where the name is the parameter's
(``unicron.state.chunks``) and the path that of the dictionary in the state dict (``unicron.state.user_values``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unicron.megatron.model import LocatedShard, is_megatron, located_shards, unwrapped
from unicron.state.chunks import StateChunk, dtype_of, name_of, undivided
from unicron.state.user_values import Values

USER = "state"
"""The first component of the keys of the user's state, in snapshots, checkpoints and transfers."""

DOCUMENT = f"{USER}/document"
"""Key of the chunk that contains everything else of the user's state, packed."""

WRAPPER = "module."
"""What wrappers (data parallelism, half precision, torch's AveragedModel) put before the names of parameters."""


def is_users(chunk: StateChunk) -> bool:
    """Return whether a chunk is of the user's state."""
    return chunk.key.startswith(f"{USER}/")


def document_chunk(size_bytes: int) -> StateChunk:
    """Return the chunk of everything that is packed, of a size in bytes."""
    return undivided(DOCUMENT, (size_bytes,), "uint8")


class NamedShards:
    """The shards of one model by the names that its parameters and persistent buffers have on this rank."""

    def __init__(self, model: Any) -> None:
        """Look at a model.

        Args:
            model: the rank's shard of it, Megatron's DistributedDataParallel or a plain module.
        """
        self.model = model
        self._by_name: dict[str, list[LocatedShard]] = {}
        listed = list(located_shards(model))
        if not is_megatron(model):
            self._by_name = {_bare(shard.name): [shard] for shard in listed}
            return
        by_tensor: dict[int, list[LocatedShard]] = {}
        for shard in listed:
            by_tensor.setdefault(id(shard.tensor), []).append(shard)
        for name, tensor in unwrapped(model).state_dict(keep_vars=True).items():
            found = by_tensor.pop(id(tensor), None)  # a tied tensor has one name
            if found is not None:
                self._by_name[_bare(name)] = found

    def prefix_of(self, key: str, tensor: torch.Tensor) -> str | None:
        """Return what a key has before the name of the parameter that a tensor is like; None: it is like none."""
        name = _bare(key)
        shards = self._by_name.get(name)
        if shards is None or shards[0].tensor.shape != tensor.shape:
            return None
        return key[: len(key) - len(name)]

    def chunks(self, values: Values) -> dict[StateChunk, torch.Tensor]:
        """Return the tensors of encoded values that are like parameters, by chunk, each in its shard's shape."""
        return {
            chunk: view
            for path, tensors in values.like_parameters.items()
            for key, tensor in tensors.items()
            for chunk, view in self._parts(path, _bare(key), tensor)
        }

    def required(self, available: Iterable[StateChunk]) -> list[StateChunk]:
        """Return the chunks that this rank needs, in a fixed order, of a state of which some chunks are known."""
        dtypes = {(chunk.name, chunk.kind): chunk.dtype for chunk in available}
        return [
            StateChunk(
                f"{USER}/{shard.name}/{path}", shard.global_shape, shard.offset, shard.shape, 0,
                math.prod(shard.shape), dtypes[shard.name, path],
            )
            for shards in self._by_name.values()
            for shard in shards
            for path in sorted(path for name, path in dtypes if name == shard.name)
        ]  # fmt: skip

    def allocate(self, required: Iterable[StateChunk]) -> AllocatedTensors:
        """Return tensors for required chunks."""
        dtypes = {(chunk.name, chunk.kind): chunk.dtype for chunk in required}
        paths = {path for _, path in dtypes}
        found = AllocatedTensors()
        for name, shards in self._by_name.items():
            for path in sorted(path for path in paths if (shards[0].name, path) in dtypes):
                like = shards[0].tensor
                tensor = torch.zeros(like.shape, dtype=dtype_of(dtypes[shards[0].name, path]), device=like.device)
                found.tensors.setdefault(path, {})[name] = tensor
                found.chunks.update(self._parts(path, name, tensor))
        return found

    def _parts(self, path: str, name: str, tensor: torch.Tensor) -> Iterable[tuple[StateChunk, torch.Tensor]]:
        for shard in self._by_name[name]:
            size = math.prod(shard.shape)
            key = f"{USER}/{shard.name}/{path}"
            chunk = StateChunk(key, shard.global_shape, shard.offset, shard.shape, 0, size, name_of(tensor.dtype))
            yield chunk, tensor.reshape(-1)[shard.start : shard.start + size].view(shard.shape)


class AllocatedTensors:
    """Tensors of a rank's user state, to be filled chunk by chunk."""

    def __init__(self) -> None:
        """Begin with none."""
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        """Path -> the parameter's name on this rank -> the tensor."""
        self.chunks: dict[StateChunk, torch.Tensor] = {}
        """Views of the tensors."""

    def fill(self, path: str, prefix: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a dictionary by key: see ``unicron.state.user_values.decode``."""
        return {f"{prefix}{name}": tensor for name, tensor in self.tensors.get(path, {}).items()}


def _bare(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    while name.startswith(WRAPPER):
        name = name[len(WRAPPER) :]
    return name
