"""What this library needs to know about a model: whether Megatron wraps it, and its sharded state dict.

A *sharded state dict* names every parameter and persistent buffer by a key that no layout changes, and locates this
rank's part of it in the global tensor (``megatron.core.dist_checkpointing``). A plain ``torch.nn.Module`` has no such
dict; each of its tensors is one whole shard.

A rank's *model* is what the user's ``build`` returned: one module or, of an interleaved pipeline, a list of modules, as
Megatron's schedules take it. Each module of it is a *model chunk*.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from unicron.errors import UnicronError


def model_chunks(model: Any) -> list[Any]:
    """Return the modules of a rank's model, in the order of their layers."""
    return list(model) if isinstance(model, list | tuple) else [model]


def parameters(model: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of a rank's model, chunk by chunk."""
    for chunk in model_chunks(model):
        yield from chunk.parameters()


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the tensor that backward passes add a trained parameter's gradient to.

    The tensor is in Megatron's buffer (``main_grad``) or, for a plain module, it is ``.grad``, which this library has
    made (``unicron.gradients.buffers``).
    """
    found: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if found is None:
        found = parameter.grad
    assert found is not None
    return found


def is_megatron(model: Any) -> bool:
    """Return whether a model is Megatron's, in Megatron's DistributedDataParallel."""
    return all(hasattr(getattr(chunk, "module", None), "sharded_state_dict") for chunk in model_chunks(model))


def config_of(model: Any) -> Any:
    """Return the configuration of a Megatron model that the schedules read: that of its first chunk."""
    return model_chunks(model)[0].config


def unwrapped(chunk: Any) -> Any:
    """Return the module inside Megatron's wrappers (data parallelism, half precision)."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    return chunk


def checkpoint_metadata() -> dict[str, Any]:
    """Return the metadata with which sharded state dicts are made.

    Each layer has a key of its own, so that names do not depend on the pipeline, and a distributed optimizer's state
    has the form of an undivided one. The dictionary is new on each call: Megatron adds the present generation's process
    group to the one that it gets.
    """
    return {"non_homogeneous_layers": True, "distrib_optim_sharding_type": "fully_reshardable"}


def sharded_parameters(model: Any) -> Iterator[Any]:
    """Yield the shards of a rank's Megatron model as Megatron's ShardedTensors.

    A parameter that consists of several parts, such as a gated MLP's first weight, has several ShardedTensors of one
    key.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for chunk in model_chunks(model):
        for entry in nested_values(chunk.module.sharded_state_dict(metadata=checkpoint_metadata())):
            if isinstance(entry, ShardedTensorFactory):
                yield from nested_values(entry.build())
            elif isinstance(entry, ShardedTensor) and entry.data is not None:
                yield entry


class LocatedShard(NamedTuple):
    """One shard of a global tensor, in the memory of this rank."""

    name: str
    """The key of the global tensor."""
    tensor: torch.Tensor
    """The local tensor that contains the shard: a parameter or a persistent buffer."""
    start: int
    """The place at which the shard begins in the flattened local tensor. One parameter may contain several shards (a
    gated MLP)."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """The place at which the shard begins in the global tensor."""
    shape: tuple[int, ...]


def located_shards(model: Any) -> Iterator[LocatedShard]:
    """Yield the shards of a rank's model: of all parameters and persistent buffers.

    Raises:
        UnicronError: a parameter of a Megatron model is not in the model's sharded state dict.
    """
    for chunk in model_chunks(model):
        yield from _located_shards_of(chunk)


def _located_shards_of(chunk: Any) -> Iterator[LocatedShard]:
    if not is_megatron(chunk):
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                shape = tuple(tensor.shape)
                yield LocatedShard(name, tensor, 0, shape, (0,) * len(shape), shape)
        return
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    state = chunk.module.sharded_state_dict(metadata=checkpoint_metadata())
    found = set()
    for entry in nested_values(state):
        if not isinstance(entry, ShardedTensor | ShardedTensorFactory) or entry.data is None:
            continue
        found.add(entry.data)
        for shard in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:
            yield LocatedShard(
                name=shard.key,
                tensor=entry.data,
                start=shard.data.storage_offset() - entry.data.storage_offset(),
                global_shape=tuple(shard.global_shape),
                offset=tuple(shard.global_offset),
                shape=(1,) * shard.prepend_axis_num + tuple(shard.local_shape),
            )
    missing = [name for name, parameter in chunk.module.named_parameters() if parameter not in found]
    if missing:
        raise UnicronError(f"parameters that the model's sharded state dict lacks: {', '.join(missing)}")
