"""The tensors in one rank's memory that make up its state, found by chunk (``unicron.state.chunks``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from unicron.errors import UnicronError
from unicron.megatron import optimizer as optimizers
from unicron.megatron.grad_scaler import NAME, GradScaler
from unicron.megatron.model import LocatedShard, is_megatron, located_shards
from unicron.megatron.optimizer import UpdatedRange, torch_optimizers
from unicron.state.chunks import (
    MAIN,
    OPTIMIZER,
    PARAMETER,
    ParameterShard,
    StateChunk,
    dtype_of,
    name_of,
    undivided,
)


class LocalShard(NamedTuple):
    """A parameter shard in this rank's memory."""

    shard: ParameterShard
    weights: torch.Tensor
    """The shard's values, in its shape: a view of the model's."""
    main: torch.Tensor | None
    """The tensor that the torch optimizer keeps its state for, possibly in float32; None: it updates no part."""
    start: int
    """Where the updated range begins in the flattened ``main``."""
    is_copy: bool
    """Whether ``main`` is a copy and not the weights themselves."""
    is_trained: bool
    """Whether the optimizer of some rank updates the parameter."""


class StateTensors:
    """Parameters, persistent buffers and optimizer state of one rank, as views: writing to a view changes the state."""

    def __init__(self, model: Any, optimizer: Any, scaler: GradScaler | None = None) -> None:
        """Look at a model and its optimizer.

        Args:
            model: the rank's shard of the model: Megatron's DistributedDataParallel, a list of such model chunks, or a
                plain module.
            optimizer: its optimizer.
            scaler: the optimizer's loss scale.
        """
        self._model, self._optimizer, self._scaler = model, optimizer, scaler or GradScaler(optimizer)

    @functools.cached_property
    def local_shards(self) -> list[LocalShard]:
        """The parameters and persistent buffers of this rank, cut where global tensors are cut.

        Raises:
            UnicronError: a parameter of a Megatron model is not in the model's sharded state dict.
        """
        ranges = dict(optimizers.updated_ranges(self._optimizer))
        found = []
        for located in located_shards(self._model):
            size: int = math.prod(located.shape)
            begin, tensor = located.start, located.tensor
            weights = _weights(located)
            updated = ranges.get(tensor, UpdatedRange(tensor, 0, 0, False))
            main: torch.Tensor | None = updated.main if tensor in ranges else None
            # The optimizer may update a range of the parameter, and the parameter may be several shards.
            low, high = max(updated.start, begin), min(updated.stop, begin + size)
            if low >= high and size:
                main, low, high = None, begin, begin
            shard = ParameterShard(
                name=located.name,
                global_shape=located.global_shape,
                offset=located.offset,
                shape=located.shape,
                dtype=name_of(tensor.dtype),
                start=low - begin,
                stop=high - begin,
                is_updated=main is not None,
            )
            trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
            found.append(LocalShard(shard, weights, main, low - updated.start, updated.is_copy, trained))
        if self._scaler.applies:
            numbers = self._scaler.numbers
            shape = tuple(numbers.shape)
            shard = ParameterShard(NAME, shape, (0,), shape, name_of(numbers.dtype), 0, 0, is_updated=False)
            found.append(LocalShard(shard, numbers, None, 0, is_copy=False, is_trained=False))
        return found

    @property
    def shards(self) -> list[ParameterShard]:
        """The shards with which this rank computes."""
        return [local.shard for local in self.local_shards]

    @property
    def has_optimizer_state(self) -> bool:
        """Whether this rank's optimizer updates anything."""
        return any(local.main is not None for local in self.local_shards)

    def chunks(self) -> dict[StateChunk, torch.Tensor]:
        """Return the state in this rank's memory. A whole chunk's tensor has the shard's shape, a range's is flat.

        Raises:
            UnicronError: the optimizer keeps a state that cannot be named in every layout.
        """
        found: dict[StateChunk, torch.Tensor] = {}
        for local in self.local_shards:
            shard = local.shard
            _add(found, f"{PARAMETER}/{shard.name}", shard, local.weights, 0, shard.size)
            if local.main is None:
                continue
            for kind, value in self._optimizer_state(local):
                key = f"{OPTIMIZER}/{shard.name}/{kind}"
                if value.shape == local.main.shape and value.dim():
                    whole = value.shape == shard.shape
                    values = value if whole else value.reshape(-1)[local.start :][: shard.stop - shard.start]
                    _add(found, key, shard, values, shard.start, shard.stop)
                elif value.dim() == 0 or not is_megatron(self._model):
                    found[undivided(key, tuple(value.shape), name_of(value.dtype))] = value
                else:
                    raise UnicronError(f"{key}: of shape {tuple(value.shape)}, neither a number nor like its parameter")
        return found

    def updated_chunks(self) -> dict[StateChunk, torch.Tensor]:
        """Return the chunks with an update of a distributed optimizer that the ranks have not yet gathered.

        The parameters' chunks are the range that this rank's optimizer updates, and all parameters that no optimizer
        updates.
        """
        found = self._updated_here()
        for local in self.local_shards:
            if not local.is_trained:
                _add(found, f"{PARAMETER}/{local.shard.name}", local.shard, local.weights, 0, local.shard.size)
        return found

    def own_chunks(self) -> set[StateChunk]:
        """Return which of the ``updated_chunks`` no other rank has: those of a distributed optimizer."""
        return set(self._updated_here())

    def _updated_here(self) -> dict[StateChunk, torch.Tensor]:
        found = {chunk: values for chunk, values in self.chunks().items() if chunk.is_optimizer_state}
        for local in self.local_shards:
            if local.is_trained:
                shard = local.shard
                _add(found, f"{PARAMETER}/{shard.name}", shard, local.weights, shard.start, shard.stop)
        return found

    def allocate(self, required: Iterable[StateChunk]) -> None:
        """Make the optimizer's state contain exactly the kinds among the required chunks; all values are zero."""
        updated = {local.shard.name: local for local in self.local_shards if local.main is not None}
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for chunk in required:
            if not chunk.is_optimizer_state or chunk.kind == MAIN:
                continue
            local = updated[chunk.name]
            assert local.main is not None
            dtype = dtype_of(chunk.dtype)
            if chunk.global_shape == local.shard.global_shape != ():
                values = torch.zeros_like(local.main, dtype=dtype, requires_grad=False)
            else:
                # Torch keeps numbers (the count of steps) on the CPU.
                values = torch.zeros(chunk.shape, dtype=dtype, device=local.main.device if chunk.shape else "cpu")
            state.setdefault(local.main, {})[chunk.kind] = values
        for one in torch_optimizers(self._optimizer):
            for group in one.param_groups:
                for main in group["params"]:
                    one.state[main] = state.get(main, {})
            optimizers.renew_scales(one)

    def reset(self) -> None:
        """Make the optimizer's state what it is before the first update of the model's present parameters."""
        self.allocate(())
        optimizers.reset_counts(self._optimizer)
        self._scaler.reset()

    def count_steps(self, version: int) -> None:
        """Set the count of updates where the optimizer keeps one count for all parameters of a group.

        It does not count updates that the loss scale has skipped, whose number is that of the present state.
        """
        optimizers.count_steps(self._optimizer, version - self._scaler.skips)

    def _optimizer_state(self, local: LocalShard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield kind and values of the optimizer's state of a shard."""
        assert local.main is not None
        if local.is_copy:
            yield MAIN, local.main.data
        for one in torch_optimizers(self._optimizer):
            for kind, value in sorted(one.state.get(local.main, {}).items()):
                if isinstance(value, torch.Tensor):
                    yield kind, value
                elif value is not None:
                    raise UnicronError(f"the optimizer's state {kind!r} is not a tensor but {type(value).__name__}")


def parameter_chunks(model: Any) -> dict[StateChunk, torch.Tensor]:
    """Return the parameters and persistent buffers of a rank's model by name, as whole chunks.

    Raises:
        UnicronError: a parameter of a Megatron model is not in the model's sharded state dict.
    """
    found: dict[StateChunk, torch.Tensor] = {}
    for one in located_shards(model):
        size, dtype = math.prod(one.shape), name_of(one.tensor.dtype)
        found[StateChunk(one.name, one.global_shape, one.offset, one.shape, 0, size, dtype)] = _weights(one)
    return found


def _weights(located: LocatedShard) -> torch.Tensor:
    """Return the values of a shard, in its shape: a view of the model's."""
    if located.tensor.shape == located.shape:
        return located.tensor.data
    size = math.prod(located.shape)
    return located.tensor.data.view(-1)[located.start : located.start + size].view(located.shape)


def _add(
    found: dict[StateChunk, torch.Tensor],
    key: str,
    shard: ParameterShard,
    values: torch.Tensor,
    start: int,
    stop: int,
) -> None:
    """Add the chunk of a range of a shard; ``values``: those of the whole shard, or of that range alone."""
    if stop == start and shard.size:
        return
    chunk = StateChunk(key, shard.global_shape, shard.offset, shard.shape, start, stop, name_of(values.dtype))
    if chunk.is_whole:
        found[chunk] = values.view(shard.shape)
    else:
        found[chunk] = values if values.numel() == stop - start else values.view(-1)[start:stop]
