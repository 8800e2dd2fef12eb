"""The samples of micro-batches, as Megatron-LM's data loader ``single`` deals them: by number, on any rank.

There, micro-batch j of data-parallel rank r of R is the (j x R + r)th of the global batch. That is the library's deal,
so the samples of micro-batch k are a function of the samples consumed before the step, and of k alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch.utils.data import default_collate


def sample_ids(consumed: int, micro_batch: int, size: int) -> list[int]:
    """Return the samples of a micro-batch.

    Args:
        consumed: samples of all steps before.
        micro_batch: its number in the step.
        size: samples in each.
    """
    first = consumed + micro_batch * size
    return list(range(first, first + size))


class Samples:
    """Stands for Megatron-LM's iterator of one model chunk; ``forward_step`` of the script takes batches from it."""

    def __init__(self, dataset: Any, *, is_test: bool = False) -> None:
        """Prepare to read a dataset; None on ranks that do not read one. ``is_test``: whether it is the test set."""
        self._dataset, self.is_test = dataset, is_test
        self._order: deque[tuple[int, list[int]]] = deque()
        self._present: list[int] = []

    def order(self, micro_batches: Iterable[tuple[int, list[int]]]) -> None:
        """Set the micro-batches of the next call of a schedule: numbers and samples."""
        self._order = deque(micro_batches)

    def turn(self) -> int:
        """Turn to the next micro-batch, whose forward pass begins; return its number."""
        number, self._present = self._order.popleft()
        return number

    def __iter__(self) -> Samples:
        """Return this object."""
        return self

    def __next__(self) -> Any:
        """Return the batch of the present micro-batch."""
        if self._dataset is None:
            raise StopIteration
        return default_collate([self._dataset[i] for i in self._present])
