"""Accumulation of gradients as integers: additions are exact, so order and number of ranks do not matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from unicron.errors import NonFiniteValue
from unicron.gradients.accumulators import SeparateAccumulator

GRIDS = (2.0**-24, 2.0**-64)
"""A number is represented by two float64 integers: multiples of 2**-24 and, of the rest (at most 2**-25), of 2**-64.

float64 adds integers up to 2**53 exactly. A float32 (24 significant bits) of 2**-41 and larger is represented exactly,
a smaller one to within 2**-65."""

RANGE = 2.0**27
"""Limit of the sum of absolute values. 2**29 would fit the first part; ``add_exactly`` splits numbers below 2**27."""

MAX_ADDENDS = 1 << 14
"""Most numbers that can be added up: the second integer takes up to 2**39 from each, and 2**53 in all."""

BLOCK = 1 << 16
"""Number of elements that are split at a time: temporaries of 0.5 MB stay in a core's cache."""


class FixedPointAccumulator(SeparateAccumulator):
    """Sums of integers: the same bits whatever the order and the number of ranks.

    Each number is rounded once, when its micro-batch is added, and the total once, when it becomes a float32 again.
    """

    numbers_per_element = len(GRIDS)

    def __init__(self, tensors: Sequence[torch.Tensor], *, micro_batches: int, **options: Any) -> None:
        """Allocate the sums.

        Args:
            tensors: the tensors that backward passes add to.
            micro_batches: the number that is added up.
            options: those of ``SeparateAccumulator``.

        Raises:
            ValueError: more micro-batches than can be added exactly.
        """
        super().__init__(tensors, dtype=torch.float64, **options)
        # A parameter that is used twice has two gradients in a micro-batch; an exchanged parameter has one on each
        # rank.
        each = max([2, *(exchange.ranks for exchange in self._exchanges)])
        addends = each * micro_batches
        if addends > MAX_ADDENDS:
            raise ValueError(f"exact mode adds up to {MAX_ADDENDS // each} micro-batches, not {micro_batches}")
        self._scratch = torch.empty(2, BLOCK, dtype=torch.float64, device=tensors[0].device)
        self.limit = RANGE / addends
        """Largest absolute value of one gradient of one micro-batch (scaled by 1/M, as all are)."""

    def _zeros(self, elements: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.numbers_per_element, elements, dtype=self._dtype, device=device)

    def add(self, first: int, chunk: int = 0) -> None:
        """Add a chunk's buffers to the sums, and set them to zero."""
        each = [torch.linalg.vector_norm(tensor, math.inf) for tensor in self._sources[chunk]]
        largest = torch.stack(each).max()
        if not float(largest) <= self.limit:  # this is also true if it is not a number
            raise NonFiniteValue(f"gradient {float(largest)}; exact mode takes values up to {self.limit:g}")
        for total, locations in zip(self._sums[first:], self._added[chunk][first:], strict=True):
            for _, offset, buffer in locations:
                add_exactly(total[:, offset : offset + buffer.numel()], buffer, self._scratch)
        self.drop(chunk)

    def check_finite(self, first: int) -> None:
        """Do nothing, since a value that is not finite cannot be added."""

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        return value(total)


def add_exactly(total: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> None:
    """Add numbers (absolute values below 2**27) to their sums, [parts, n], in place; ``scratch``: float64 [2, BLOCK].

    A number is split by rounding it to a multiple of the grid: added to 1.5 * 2**52 of them, where neighbouring float64
    are one grid apart, and that subtracted again (the pre-rounding of Demmel and Nguyen's reproducible sums). What
    remains is exact, and so are the additions.
    """
    coarse, fine = (1.5 * 2.0**52 * grid for grid in GRIDS)
    for start in range(0, values.numel(), BLOCK):
        block = values[start : start + BLOCK]
        high, low = total[:, start : start + BLOCK]
        rest, whole = scratch[:, : block.numel()]
        rest.copy_(block)
        torch.add(rest, coarse, out=whole).sub_(coarse)
        high.add_(whole)
        low.add_(rest.sub_(whole).add_(fine).sub_(fine))


def value(total: torch.Tensor) -> torch.Tensor:
    """Return the numbers, in float64, that sums of parts stand for."""
    return total[0] + total[1]
