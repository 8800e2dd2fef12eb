"""The reduction of a step's gradients over the data-parallel ranks: bucket by bucket, in copies of those under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron.gradients.accumulators import Accumulator
from unicron.link.waiting import Wait

IN_FLIGHT = 3
"""Reductions under way at once: the transfer of one covers the copies of the next and of the one before."""


def reduce(
    accumulator: Accumulator,
    first: int,
    group: Any,
    wait: Wait,
    *,
    before: Callable[[int], None],
    done: Callable[[int], None],
    broken: Callable[[list[Any]], None],
    in_flight: int = IN_FLIGHT,
) -> None:
    """Replace the sums of buckets from ``first`` on by their totals over ``group``, in order.

    Args:
        accumulator: what is reduced.
        first: the first bucket that is not yet reduced.
        group: the ranks that have the same shard of the model.
        wait: waits for a collective.
        before: called before a bucket is sent, with its number.
        done: called with the number of reduced buckets, whenever one more is reduced.
        broken: called with the collectives that were sent and not waited for, if one broke or was left.
        in_flight: number of buckets that are sent before the first is waited for.

    Raises:
        RuntimeError: a collective broke; the buckets reported to ``done`` keep their totals.
    """
    reduction = Reduction(accumulator, first, group, done)
    try:
        reduction.run(wait, before, until=accumulator.buckets, in_flight=in_flight)
    except BaseException:
        broken(reduction.give_up())
        raise


class _Sent(NamedTuple):
    """A bucket that is being reduced, in a copy."""

    bucket: int
    total: torch.Tensor
    work: Any
    """Torch's ``Work``."""


class Reduction:
    """Replaces the sums of one step's buckets by their totals over a group, in order.

    Buckets before ``stored`` have their totals. From there up to ``launched`` a copy of each is under way, and the sums
    are as they were; so a broken collective costs none.
    """

    def __init__(self, accumulator: Accumulator, first: int, group: Any, done: Callable[[int], None]) -> None:
        """Begin behind the buckets that are already reduced.

        Args:
            accumulator: what is reduced.
            first: the first bucket that is not yet reduced.
            group: the ranks that have the same shard of the model.
            done: called with the number of buckets that are reduced, whenever one more is.
        """
        self._accumulator, self._group, self._done = accumulator, group, done
        self.is_alone = bool(group.size() == 1)
        """Whether the sums are the totals."""
        self.stored = self.launched = first
        self._sent: deque[_Sent] = deque()

    @property
    def oldest(self) -> Any:
        """The collective (torch's ``Work``) that was sent first of those under way; None: none is under way."""
        return self._sent[0].work if self._sent else None

    def send(self) -> None:
        """Send a copy of the next bucket."""
        if not self.is_alone:
            total = self._portion_of(self.launched)
            work = dist.all_reduce(total, group=self._group, async_op=True)
            self._sent.append(_Sent(self.launched, total, work))
        self.launched += 1

    def _portion_of(self, bucket: int) -> torch.Tensor:
        """Return a copy of a bucket's sum as the sum counts in the total."""
        copy, portion = self._accumulator.load(bucket), self._accumulator.portion
        return copy if portion == 1.0 else copy.mul_(portion)

    def store(self, wait: Wait) -> None:
        """Wait for the next total, and put it in the place of the sum.

        Raises:
            RuntimeError: the collective broke.
        """
        if self._sent:
            bucket, total, work = self._sent.popleft()
            wait(work)
            self._accumulator.store(bucket, total)
            self._accumulator.reuse(total)
        elif self._accumulator.portion != 1.0:
            total = self._portion_of(self.stored)
            self._accumulator.store(self.stored, total)
            self._accumulator.reuse(total)
        self.stored += 1
        self._done(self.stored)

    def run(self, wait: Wait, before: Callable[[int], None], *, until: int, in_flight: int = IN_FLIGHT) -> None:
        """Send all buckets, and store the totals of those before ``until``.

        Args:
            wait: waits for a collective.
            before: called before a bucket is sent, with its number.
            until: number of buckets that are to have their totals.
            in_flight: number of buckets that are sent before the first is waited for.

        Raises:
            RuntimeError: a collective broke; the buckets reported to ``done`` keep their totals.
        """
        while self.launched < self._accumulator.buckets:
            before(self.launched)
            self.send()
            while self.stored < until and (self.is_alone or len(self._sent) >= in_flight):
                self.store(wait)
        while self.stored < until:
            self.store(wait)

    def give_up(self) -> list[Any]:
        """Return the collectives that were sent and not waited for, and forget them.

        They may never end, and the destructor of their group would wait for them.
        """
        given_up = [work for _, _, work in self._sent]
        self._sent.clear()
        return given_up
