"""Tensors of the user's state that are like parameters (an average of the weights) as chunks of global tensors.

Such a tensor stands in its state dict under the name of a parameter or persistent buffer, and has its shape. It then
moves between layouts as the parameter does. Keys: ``state/<name>/<path>``, where the name is the parameter's
(``unicron.state.chunks``) and the path that of the dictionary in the state dict (``unicron.state.user_values``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from unicron.megatron.model import LocatedShard, is_megatron, located_shards, model_chunks, unwrapped
from unicron.state.chunks import StateChunk, dtype_of, name_of, undivided
from unicron.state.user_values import Values

USER = "state"
"""The first component of the keys of the user's state, in snapshots, checkpoints and transfers."""

DOCUMENT = f"{USER}/document"
"""Key of the chunk that contains everything else of the user's state, packed."""

NUMBER = "|"
"""Stands, in a prefix, where the number of the model chunk is: a list of chunks has names as torch's ModuleList."""

WRAPPER = "module."
"""Prefixes that wrappers (data parallelism, half precision, torch's AveragedModel) put before the names of
parameters."""


def is_users(chunk: StateChunk) -> bool:
    """Return whether a chunk belongs to the user's state."""
    return chunk.key.startswith(f"{USER}/")


def document_chunk(size_bytes: int) -> StateChunk:
    """Return the chunk of everything that is packed, of a size in bytes."""
    return undivided(DOCUMENT, (size_bytes,), "uint8")


class _Name(NamedTuple):
    """A parameter's or persistent buffer's name on this rank."""

    number: str
    """Number of the model chunk, with a dot behind it; empty where the model is one module."""
    bare: str
    """The name without the prefixes of wrappers."""


class NamedShards:
    """The shards of one model by the names that its parameters and persistent buffers have on this rank."""

    def __init__(self, model: Any) -> None:
        """Look at a model.

        Args:
            model: the rank's shard of it: Megatron's DistributedDataParallel, a list of such chunks, or a plain module.
        """
        self.model = model
        self._is_list = isinstance(model, list | tuple)
        self._by_name: dict[_Name, list[LocatedShard]] = {}
        for index, chunk in enumerate(model_chunks(model)):
            for name, shards in _shards_by_name(chunk).items():
                self._by_name[_Name(f"{index}." if self._is_list else "", name)] = shards

    def prefix_of(self, key: str, tensor: torch.Tensor) -> str | None:
        """Return the part of a key before the name of the parameter that a tensor is like; None: it is like none."""
        prefix, name = self._parsed(key)
        shards = self._by_name.get(name)
        return None if shards is None or shards[0].tensor.shape != tensor.shape else prefix

    def _parsed(self, key: str) -> tuple[str, _Name]:
        """Return the parts of a key before and behind the model chunk's number, and the name."""
        outer, number = "", ""
        if self._is_list:
            found = re.match(rf"((?:{re.escape(WRAPPER)})*)(\d+\.)", key)
            outer, number = found.groups() if found else ("", "")
        rest = key[len(outer) + len(number) :]
        name = _bare(rest)
        return f"{outer}{NUMBER}{rest[: len(rest) - len(name)]}", _Name(number, name)

    def chunks(self, values: Values) -> dict[StateChunk, torch.Tensor]:
        """Return the tensors of encoded values that are like parameters, by chunk, each in its shard's shape."""
        return {
            chunk: view
            for path, tensors in values.like_parameters.items()
            for key, tensor in tensors.items()
            for chunk, view in self._parts(path, self._parsed(key)[1], tensor)
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
        """Return empty tensors for required chunks."""
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

    def _parts(self, path: str, name: _Name, tensor: torch.Tensor) -> Iterable[tuple[StateChunk, torch.Tensor]]:
        for shard in self._by_name[name]:
            size = math.prod(shard.shape)
            key = f"{USER}/{shard.name}/{path}"
            chunk = StateChunk(key, shard.global_shape, shard.offset, shard.shape, 0, size, name_of(tensor.dtype))
            yield chunk, tensor.reshape(-1)[shard.start : shard.start + size].view(shard.shape)


class AllocatedTensors:
    """Tensors of a rank's user state, to be filled chunk by chunk."""

    def __init__(self) -> None:
        """Begin without tensors."""
        self.tensors: dict[str, dict[_Name, torch.Tensor]] = {}
        """Path -> the parameter's name on this rank -> the tensor."""
        self.chunks: dict[StateChunk, torch.Tensor] = {}
        """Views of the tensors."""

    def fill(self, path: str, prefix: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a dictionary by key: see ``unicron.state.user_values.decode``."""
        outer, inner = prefix.split(NUMBER)
        tensors = self.tensors.get(path, {})
        return {f"{outer}{name.number}{inner}{name.bare}": tensor for name, tensor in tensors.items()}


def _shards_by_name(chunk: Any) -> dict[str, list[LocatedShard]]:
    """Return the shards of a model chunk by bare name."""
    if not is_megatron(chunk):
        return {_bare(shard.name): [shard] for shard in located_shards(chunk)}
    by_tensor: dict[int, list[LocatedShard]] = {}
    for shard in located_shards(chunk):
        by_tensor.setdefault(id(shard.tensor), []).append(shard)
    names = unwrapped(chunk).state_dict(keep_vars=True).items()
    # Each tensor is taken once: a tied one has one name.
    return {_bare(name): by_tensor.pop(id(tensor)) for name, tensor in names if id(tensor) in by_tensor}


def _bare(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    while name.startswith(WRAPPER):
        name = name[len(WRAPPER) :]
    return name
