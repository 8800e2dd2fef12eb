"""Exchanges: the sum of some gradients over ranks outside of the data-parallel group, once the latter have reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

AllReduce = Callable[[torch.Tensor, Any], None]
"""Sums a tensor, in place, over a process group."""


class Exchange(NamedTuple):
    """Gradients of which each rank of a group has its own total; the optimizer needs the sum of these totals."""

    tensors: tuple[int, ...]
    """Indices; together they are sent in one collective. No tensor is in two exchanges."""
    group: Callable[[], Any]
    """Returns the group in the present generation."""
    ranks: int
    """Of the group, in every generation in which the rank has the same shard of the model."""
