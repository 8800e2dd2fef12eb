"""What all ranks agree on at the end of a step, before its gradients are reduced: losses, samples, and what comes next.

So the contribution of every rank is known when the gradients count, even if the rank is lost afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.accounting import PartialStep, StepAccount
from unicron.errors import SampleAccountingError
from unicron.link.waiting import Wait
from unicron.megatron.parallel import data_group, last_stage, model_coordinate


class Agreement(NamedTuple):
    """What the ranks agreed on beside the account of the step."""

    request: int
    """The largest request of any rank: one of ``NOTHING``, ``DRAIN``, ... of ``unicron.link.agent_link``."""
    statuses: list[int]
    """The largest of what each rank reported, place by place."""


def agree(
    partial: PartialStep,
    *,
    micro_batches: int,
    buckets: int,
    request: int,
    statuses: Sequence[int] = (),
    wait: Wait,
) -> Agreement:
    """Agree on the account of the step in progress, which becomes ``partial.account``. All ranks call it.

    Every micro-batch has a row for its count, its loss and its sample ids; everything travels as float64 in one
    reduction, in which ids are exact up to 2**53.

    Args:
        partial: the step, on this rank.
        micro_batches: in the step, over all replicas.
        buckets: of gradients.
        request: what this rank's agent requests for the next boundary.
        statuses: what this rank reports beside it.
        wait: waits for a collective.

    Raises:
        SampleAccountingError: a micro-batch is missing or was computed twice.
        RuntimeError: a collective broke.
    """
    width = max((len(ids) for ids in partial.samples.values()), default=0)
    # The number of samples in a micro-batch is the same on all ranks, but a rank may have computed none.
    head = torch.tensor([width, request, *statuses], dtype=torch.int64, device=device.current())
    wait(dist.all_reduce(head, op=dist.ReduceOp.MAX, async_op=True))
    width, request, *worst = head.tolist()
    if partial.account is None:
        partial.account = _account(partial, micro_batches, width, wait)
        if dist.get_world_size() == data_group().size():
            return Agreement(request, worst)  # there are no other model shards
    if partial.reduced < buckets:
        counts = torch.zeros(micro_batches, dtype=torch.float64)
        counts[list(partial.samples)] = 1.0
        _check_counts([int(n) for n in _summed(counts, data_group(), wait).tolist()], partial.step)
    return Agreement(request, worst)


def _account(partial: PartialStep, micro_batches: int, width: int, wait: Wait) -> StepAccount:
    rows = torch.zeros(micro_batches, 2 + width, dtype=torch.float64)
    # One rank reports for each replica: the one that knows the loss.
    if model_coordinate() == (0, last_stage()):
        for k, ids in partial.samples.items():
            rows[k] = torch.tensor([1.0, partial.losses[k], *ids], dtype=torch.float64)
    summed = _summed(rows, None, wait).tolist()
    _check_counts([int(count) for count, *_ in summed], partial.step)
    loss = math.fsum(loss for _, loss, *_ in summed) / micro_batches
    return StepAccount(loss, [int(sample) for _, _, *samples in summed for sample in samples])


def _summed(values: torch.Tensor, group: Any, wait: Wait) -> torch.Tensor:
    values = values.to(device.current())
    wait(dist.all_reduce(values, group=group, async_op=True))
    return values


def _check_counts(counts: list[int], step: int) -> None:
    wrong = {k: count for k, count in enumerate(counts) if count != 1}
    if wrong:
        raise SampleAccountingError(f"step {step}: times computed, by micro-batch: {wrong}")
