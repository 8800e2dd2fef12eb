"""What all ranks agree on at the end of a step, before its gradients are reduced: losses, samples, and what comes next.

So the contribution of every rank is known when the gradients count, even if the rank is lost afterwards.

Everything travels as float64 in one sum over all ranks, in which whole numbers are exact up to 2**53: first, for each
status, how many ranks are at each level, which tells the largest; then a row for each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from unicron import device
from unicron.accounting import PartialStep, StepAccount
from unicron.errors import SampleAccountingError
from unicron.link.waiting import Wait
from unicron.megatron.parallel import data_group, last_stage, model_coordinate, virtual_stages

LEVELS = 4
"""A request is below this, and so is each status: they are small enumerations (``unicron.link.agent_link``,
``unicron.checkpoint.writer``, ``unicron.snapshot.snapshots``)."""

EXACT_BITS = 53
"""Whole numbers of fewer bits are exact in float64."""


class Agreement(NamedTuple):
    """What the ranks agreed on beside the account of the step."""

    request: int
    """The largest request of any rank: one of ``NOTHING``, ``DRAIN``, ... of ``unicron.link.agent_link``."""
    statuses: list[int]
    """The largest of what each rank reported, place by place."""


class Member(NamedTuple):
    """A rank's place among those that agree."""

    replicas: int
    """Data-parallel size."""
    shards: int
    """Of the model: the ranks of one replica."""
    shard: int
    """This rank's."""
    reporting: int
    """The shard that reports losses and samples: for each replica one rank that knows the loss."""
    chunks: int = 1
    """Model chunks of each rank, which count micro-batches on their own. The last one computes the loss."""


def member() -> Member:
    """Return this rank's place in the present process groups."""
    replicas = data_group().size()
    tensor, pipeline = model_coordinate()
    stages = last_stage() + 1
    shards = dist.get_world_size() // replicas
    return Member(replicas, shards, tensor * stages + pipeline, last_stage(), virtual_stages())


def total(values: torch.Tensor, wait: Wait) -> torch.Tensor:
    """Return the sum over all ranks, on the CPU.

    Raises:
        RuntimeError: the collective broke.
    """
    values = values.to(device.current())
    wait(dist.all_reduce(values, async_op=True))
    return values.cpu()


class EndOfStep:
    """The agreements of one generation's steps.

    A row has room for as many sample ids as the micro-batches of the step before had, which all ranks know. Where that
    is not enough, as in the first step of a generation, the ids travel in a second sum.
    """

    def __init__(self, micro_batches: int, member: Member, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Prepare the first agreement of a generation.

        Args:
            micro_batches: in one step, over all replicas.
            member: this rank's place.
            total: returns the sum of a tensor over all ranks, on the CPU.
        """
        self._micro_batches, self._member, self._total = micro_batches, member, total
        self._counts = _Counts(member)
        self._samples = 0
        """Sample ids for which a row has room."""

    @property
    def alone(self) -> bool:
        """Whether this rank is a whole replica: no peer waits for it inside its passes."""
        return self._member.shards == 1

    def agree(self, partial: PartialStep, *, buckets: int, request: int, statuses: Sequence[int] = ()) -> Agreement:
        """Agree on the account of the step in progress, which becomes ``partial.account``. All ranks call it.

        Args:
            partial: the step, on this rank.
            buckets: of gradients.
            request: what this rank's agent requests for the next boundary.
            statuses: what this rank reports beside it; each below ``LEVELS``.

        Raises:
            SampleAccountingError: a micro-batch is missing or was computed twice.
            RuntimeError: a collective broke.
        """
        accounted = partial.account is not None
        levels = _levels([request, *statuses])
        counts = self._counts.encode(partial.done, self._micro_batches)
        rows = torch.cat([counts] if accounted else [counts, self._entries(partial)], dim=1)
        summed = self._total(torch.cat([levels.view(-1), rows.view(-1)]))
        worst = _worst(summed[: levels.numel()].view_as(levels))
        rows = summed[levels.numel() :].view_as(rows)
        if not accounted:
            self._counts.check(rows, self._member.reporting, self._member.chunks - 1, partial.step)
            partial.account = self._account(partial, rows[:, counts.shape[1] :].tolist())
        if partial.reduced < buckets:
            for chunk in range(self._member.chunks):
                self._counts.check(rows, self._member.shard, chunk, partial.step)
        return Agreement(worst[0], worst[1:])

    def _entries(self, partial: PartialStep) -> torch.Tensor:
        """Return for each micro-batch its loss, the number of its sample ids, and the ids where there is room."""
        entries = torch.zeros(self._micro_batches, 2 + self._samples, dtype=torch.float64)
        if self._member.shard == self._member.reporting:
            for k in partial.done[-1]:
                ids = partial.samples[k]
                numbers = [partial.losses[k], len(ids), *(ids if len(ids) <= self._samples else [])]
                entries[k, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        return entries

    def _account(self, partial: PartialStep, entries: list[list[float]]) -> StepAccount:
        """Return the account from the sum of all ranks' entries."""
        most = max(int(number) for _, number, *_ in entries)
        if most > self._samples:
            self._samples = most
            entries = self._total(self._entries(partial)).tolist()
        loss = math.fsum(loss for loss, *_ in entries) / self._micro_batches
        return StepAccount(loss, [int(i) for _, number, *ids in entries for i in ids[: int(number)]])


class _Counts:
    """How often each micro-batch was computed, counted for each model shard, and each of its model chunks, on its own.

    The counts of several of them share a number, as its digits in a base above the number of replicas: no rank counts a
    micro-batch twice.
    """

    def __init__(self, member: Member) -> None:
        self._base = member.replicas + 1
        self._in_column = int(EXACT_BITS / math.log2(self._base))
        self._columns = -(-member.shards * member.chunks // self._in_column)
        self._shard, self._chunks = member.shard, member.chunks

    def encode(self, done: Sequence[Collection[int]], micro_batches: int) -> torch.Tensor:
        """Return this rank's counts of what each of its chunks has done, [micro_batches, columns]."""
        counts = torch.zeros(micro_batches, self._columns, dtype=torch.float64)
        for chunk, computed in enumerate(done):
            column, digit = self._place(self._shard, chunk)
            counts[list(computed), column] += float(self._base**digit)
        return counts

    def _place(self, shard: int, chunk: int) -> tuple[int, int]:
        """Return the column and the digit in which a chunk is counted."""
        return divmod(shard * self._chunks + chunk, self._in_column)

    def check(self, rows: torch.Tensor, shard: int, chunk: int, step: int) -> None:
        """Check the counts of a shard's chunk; ``rows`` begin with the sums over all ranks.

        Raises:
            SampleAccountingError: a micro-batch was not computed exactly once.
        """
        column, digit = self._place(shard, chunk)
        counts = [int(number) // self._base**digit % self._base for number in rows[:, column].tolist()]
        wrong = {k: count for k, count in enumerate(counts) if count != 1}
        if wrong:
            raise SampleAccountingError(f"step {step}: times computed, by micro-batch: {wrong}")


def _levels(statuses: Sequence[int]) -> torch.Tensor:
    """Return one at the level of each status, [statuses, LEVELS]."""
    levels = torch.zeros(len(statuses), LEVELS, dtype=torch.float64)
    levels[list(range(len(statuses))), list(statuses)] = 1.0
    return levels


def _worst(levels: torch.Tensor) -> list[int]:
    """Return the largest level of each status at which there is a rank."""
    return [max(level for level, ranks in enumerate(counts) if ranks) for counts in levels.tolist()]
