"""Exchanges: sums of some gradients over ranks outside of the data-parallel group, which has reduced them before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The ranks of the group, in every generation in which the rank has the same shard of the model."""


class ExchangeInPlace:
    """An exchange of totals where they lie."""

    def __init__(
        self, totals: Sequence[torch.Tensor], group: Callable[[], Any], dtype: torch.dtype | None = None
    ) -> None:
        """Prepare the exchange.

        Args:
            totals: flat, and as large on every rank of the group.
            group: as for ``Exchange``.
            dtype: the type in which they are added; None: their own.
        """
        self._totals, self._group, self._dtype = totals, group, dtype
        self.before: list[torch.Tensor] = []
        """The totals from before an exchange that can be undone; empty: there was none."""

    def run(self, all_reduce: AllReduce, *, undoable: bool) -> None:
        """Replace the totals by their sums over the group.

        Args:
            all_reduce: does so for one tensor.
            undoable: whether to keep the totals from before.

        Raises:
            RuntimeError: the collective broke; the totals are as they were.
        """
        if not self._totals:
            return
        sums = torch.cat([total.to(self._dtype or total.dtype) for total in self._totals])
        all_reduce(sums, self._group())
        self.before = [total.clone() for total in self._totals] if undoable else []
        parts = torch.split(sums, [total.numel() for total in self._totals])
        for total, part in zip(self._totals, parts, strict=True):
            total.copy_(part)

    def undo(self) -> None:
        """Write the totals from before back, if they were kept."""
        for total, before in zip(self._totals, self.before, strict=bool(self.before)):
            total.copy_(before)
        self.before = []

    def forget(self) -> None:
        """Forget the totals from before: a new step."""
        self.before = []
