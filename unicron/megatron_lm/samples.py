"""The samples of micro-batches, as Megatron-LM's data loaders deal them: by number, on any rank.

With ``single``, micro-batch j of data-parallel rank r of R is the (j x R + r)th of the global batch. That is the
library's deal, so the samples of micro-batch k are a function of the samples consumed before the step, and of k alone.

With ``cyclic``, each of the R replicas has a part of the dataset, and draws an order of its own from it in each epoch
(``MegatronPretrainingRandomSampler``, with data sharding). The R that the task began with stays, whatever is lost
later: then micro-batch k is still that of rank k mod R, whichever process computes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from unicron.errors import InvalidSpec


def sample_ids(consumed: int, micro_batch: int, size: int) -> list[int]:
    """Return the samples of a micro-batch.

    Args:
        consumed: the number of samples of all steps before.
        micro_batch: its number in the step.
        size: the number of samples in each.
    """
    first = consumed + micro_batch * size
    return list(range(first, first + size))


class BatchSizes:
    """The samples of each step's batch: all the same, or those of ``--rampup-batch-size``, as stock computes them."""

    def __init__(self, full: int, rampup: Sequence[int | str] | None = None) -> None:
        """Prepare to count.

        Args:
            full: samples of a batch without or behind the ramp-up.
            rampup: the first batch, what it grows by each time, and the samples during which it grows.

        Raises:
            InvalidSpec: no batches grow like that.
        """
        self._full = full
        self._first, self._increment, self._during = map(int, rampup) if rampup else (full, 0, -1)
        first, increment = self._first, self._increment
        positive = first > 0 and increment > 0 and self._during >= 0
        if rampup and not (positive and first <= full and (full - first) % increment == 0):
            raise InvalidSpec(
                f"--rampup-batch-size: {' '.join(map(str, rampup))}: the first batch has to become --global-batch-size "
                f"({full}) by whole increments, which are positive, and within samples that are not negative"
            )
        if self._first == full or not self._during:
            self._during = -1
        self._sums: list[int] = []

    @property
    def divisor(self) -> int:
        """The number that divides every batch."""
        return math.gcd(self._full, self._first, self._increment)

    def batch(self, consumed: int) -> int:
        """Return the number of samples of the batch that comes after so many samples."""
        if consumed > self._during:
            return self._full
        each = self._during / ((self._full - self._first) // self._increment)
        return self._first + int(consumed / each) * self._increment

    def consumed(self, before: int, steps: int) -> int:
        """Return the samples consumed after some steps, behind those consumed before the first of them."""
        if self._sums[:1] != [before]:
            self._sums = [before]
        while len(self._sums) <= steps and self._sums[-1] <= self._during:
            self._sums.append(self._sums[-1] + self.batch(self._sums[-1]))
        known = min(steps, len(self._sums) - 1)
        return self._sums[known] + (steps - known) * self._full

    def steps(self, samples: int) -> int:
        """Return the steps of a training of so many samples; an incomplete batch at its end is left out."""
        if self._during < 0:
            return samples // self._full
        steps = consumed = 0
        while consumed <= min(self._during, samples):
            steps, consumed = steps + 1, consumed + self.batch(consumed)
        return steps + max(0, samples - consumed) // self._full


def most_replicas(micro_batches: int, replicas: int) -> int:
    """Return the largest number of replicas, up to one, that divides the micro-batches of a step.

    Stock Megatron-LM runs with no other.
    """
    return next(count for count in range(replicas, 0, -1) if micro_batches % count == 0)


class FrozenReplicas:
    """The number of replicas to which the order of ``cyclic`` is dealt: a lasting part of the task's state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        """Return the number as a state dict."""
        return {"replicas": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the number with which the task began."""
        self.count = state["replicas"]


class CyclicOrder:
    """The order in which ``cyclic`` reads a dataset: from positions, which never end, to samples."""

    def __init__(self, total: int, size: int, replicas: int) -> None:
        """Prepare the order.

        Args:
            total: the number of samples of the dataset.
            size: the number of samples of a micro-batch.
            replicas: the number of replicas to which they are dealt.
        """
        self._size, self._replicas = size, replicas
        self._rows = total // (size * replicas)
        """Micro-batches of each replica in an epoch; what is left of the dataset is not read."""
        self._epoch, self._drawn = -1, torch.empty(0, dtype=torch.int64)

    def samples(self, position: int) -> list[int]:
        """Return the samples of the micro-batch whose first position in the order is this one."""
        row, replica = divmod(position // self._size, self._replicas)
        epoch, row = divmod(row, self._rows)
        bucket = self._rows * self._size
        if epoch != self._epoch:
            self._epoch = epoch
            self._drawn = torch.randperm(bucket, generator=torch.Generator().manual_seed(epoch))
        drawn = self._drawn[row * self._size : (row + 1) * self._size]
        return (drawn + replica * bucket).tolist()


class Samples:
    """A stand-in for Megatron-LM's iterator of one model chunk, from which the script takes batches."""

    def __init__(
        self,
        dataset: Any,
        cyclic: CyclicOrder | None = None,
        *,
        is_test: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Prepare to read a dataset.

        Args:
            dataset: None on ranks that do not read one.
            cyclic: the order of the data loader ``cyclic``; None: the dataset's own.
            is_test: whether it is the test set.
            collate: makes a batch of samples; None: torch's default.
        """
        self._dataset, self._cyclic, self.is_test = dataset, cyclic, is_test
        self._collate = collate or default_collate
        self._order: deque[tuple[int, list[int]]] = deque()
        self._present: list[int] = []

    @property
    def has_dataset(self) -> bool:
        """Whether this rank reads a dataset."""
        return self._dataset is not None

    @property
    def for_script(self) -> Samples | None:
        """What a script gets: None where the rank reads no dataset, as in stock; another rank then sends a batch."""
        return self if self.has_dataset else None

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
        ids = self._present if self._cyclic is None else self._cyclic.samples(self._present[0])
        return self._collate([self._dataset[i] for i in ids])
