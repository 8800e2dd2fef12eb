"""The hyperparameters with which an optimizer would apply an update now, as fields of an identity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from unicron.join.identity import Identity
from unicron.megatron.optimizer import OF_PEERS, torch_optimizers

COUNTS = frozenset({"step"})
"""Names of values that some optimizers count in a group; these belong to the state, which moves
(``unicron.megatron.optimizer``)."""


def hyperparameters(optimizer: Any, shard: tuple[int, int], shards: int) -> Identity:
    """Return the hyperparameters of a rank's optimizer.

    A hyperparameter that is the same in all groups has one field, which all ranks have in common. Any other has a field
    for each group, which ranks of other model shards do not have: their optimizers may have other groups.

    Args:
        optimizer: torch's, or Megatron's around it.
        shard: the rank's tensor- and pipeline-parallel rank.
        shards: the number of shards of the model.
    """
    # Empty groups that are there since other ranks have them are left out: a new process has none yet.
    groups = [group for one in torch_optimizers(optimizer) for group in one.param_groups if OF_PEERS not in group]
    values = [dict(_values(group)) for group in groups]
    names = sorted({name for of_group in values for name in of_group})
    where = f" of tensor rank {shard[0]}, stage {shard[1]}" if shards > 1 else ""
    fields = {"optimizer/class": ", ".join(type(one).__name__ for one in torch_optimizers(optimizer))}
    for name in names:
        if len({of_group.get(name) for of_group in values}) == 1:
            fields[f"optimizer/{name}"] = values[0][name]
            continue
        for number, of_group in enumerate(values):
            if name in of_group:
                fields[f"optimizer/{name} of group {number}{where}"] = of_group[name]
    return fields


def _values(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the hyperparameters of a group that are plain values, as text."""
    for name, value in group.items():
        if name in COUNTS:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if _is_plain(value) or (isinstance(value, tuple | list) and name != "params" and all(map(_is_plain, value))):
            yield name, repr(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | None)
