"""The reduction of a step's gradients over the data-parallel ranks: bucket by bucket, out of place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

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
        done: called with the number of buckets that are reduced, whenever one more is.
        broken: called with the collectives that were sent and not waited for, if one broke or was left: they may never
            end, and the destructor of their group would wait for them.
        in_flight: how many are sent before the first of them is waited for.

    Raises:
        RuntimeError: a collective broke; the buckets reported to ``done`` keep their totals.
    """
    sent: deque[tuple[int, torch.Tensor, Any]] = deque()

    def complete() -> None:
        bucket, total, work = sent.popleft()
        wait(work)
        accumulator.store(bucket, total)
        done(bucket + 1)

    try:
        for bucket in range(first, accumulator.buckets):
            before(bucket)
            if group.size() == 1:
                done(bucket + 1)  # the sum is the total
                continue
            total = accumulator.load(bucket)
            sent.append((bucket, total, dist.all_reduce(total, group=group, async_op=True)))
            if len(sent) == in_flight:
                complete()
        while sent:
            complete()
    except BaseException:
        broken([work for _, _, work in sent])
        raise
