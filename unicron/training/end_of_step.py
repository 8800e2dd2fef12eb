"""What all ranks agree on at the end of a step, before its gradients are reduced: losses, samples, and what comes next.

So the contribution of every rank is known when the gradients count, even if the rank is lost afterwards.

Everything travels as float64 in one sum over all ranks, in which whole numbers are exact up to 2**53: first, for each
status, how many ranks are at each level, which tells the largest; then a row for each micro-batch.

The numbers are put together in an array, not with tensor operations: between passes, where nothing is in the caches, a
small operation takes 10 to 30 microseconds (measured), and this would take some twenty in every step.
"""

from __future__ import annotations

import math
from array import array
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
"""Requests and statuses are below this number: they are small enumerations (``unicron.link.agent_link``,
``unicron.checkpoint.writer``, ``unicron.snapshot.snapshots``)."""

EXACT_BITS = 53
"""Number of bits below which whole numbers are exact in float64."""


class Agreement(NamedTuple):
    """The agreement of the ranks beside the account of the step."""

    request: int
    """The largest request of any rank: one of ``NOTHING``, ``DRAIN``, ... of ``unicron.link.agent_link``."""
    statuses: list[int]
    """The largest value that any rank reported, place by place."""


class Member(NamedTuple):
    """A rank's place among those that agree."""

    replicas: int
    """Data-parallel size."""
    shards: int
    """The shards of the model: the ranks of one replica."""
    shard: int
    """This rank's shard."""
    reporting: int
    """The shard that reports losses and samples: one rank of each replica, which knows the loss."""
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
    if device.is_cuda():
        values = values.to(device.current())
    wait(dist.all_reduce(values, async_op=True))
    return values.cpu()


class EndOfStep:
    """The agreements of one generation's steps.

    A row has room for as many sample ids as the micro-batches of the step before had, which all ranks know. Where that
    is not enough, as in the first step of a generation, the ids travel in a second sum.
    """

    def __init__(self, member: Member, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Prepare the first agreement of a generation.

        Args:
            member: this rank's place.
            total: returns the sum of a tensor over all ranks, on the CPU.
        """
        self._member, self._total = member, total
        self._counts = _Counts(member)
        self._samples = 0
        """Number of sample ids for which a row has room."""

    @property
    def alone(self) -> bool:
        """Whether this rank is a whole replica: no peer waits for it inside its passes."""
        return self._member.shards == 1

    def agree(self, partial: PartialStep, *, buckets: int, request: int, statuses: Sequence[int] = ()) -> Agreement:
        """Agree on the account of the step in progress, which becomes ``partial.account``. All ranks call it.

        Args:
            partial: the step, on this rank.
            buckets: the number of buckets of gradients.
            request: what this rank's agent requests for the next boundary.
            statuses: what this rank reports beside that; each is below ``LEVELS``.

        Raises:
            SampleAccountingError: a micro-batch is missing or was computed twice.
            RuntimeError: a collective broke.
        """
        accounted = partial.account is not None
        levels = [request, *statuses]
        columns, first = self._counts.columns, LEVELS * len(levels)
        width = columns if accounted else columns + self._entry_width
        numbers = _zeros(first + partial.micro_batches * width)
        for i, level in enumerate(levels):
            numbers[LEVELS * i + level] = 1.0
        self._counts.write(partial.done, numbers, first, width)
        if not accounted:
            self._write_entries(partial, numbers, first + columns, width)
        summed = self._sum(numbers)
        rows = [summed[i : i + width] for i in range(first, len(summed), width)]
        if not accounted:
            self._counts.check(rows, self._member.reporting, self._member.chunks - 1, partial.step)
            partial.account = self._account(partial, [row[columns:] for row in rows])
        if partial.reduced < buckets:
            for chunk in range(self._member.chunks):
                self._counts.check(rows, self._member.shard, chunk, partial.step)
        worst = _worst(summed[:first])
        return Agreement(worst[0], worst[1:])

    def _sum(self, numbers: array[float]) -> list[float]:
        """Return the sum over all ranks; the array may be overwritten."""
        summed: list[float] = self._total(torch.frombuffer(numbers, dtype=torch.float64)).tolist()
        return summed

    @property
    def _entry_width(self) -> int:
        """Length of an entry: a micro-batch's loss, its tokens, the number of its sample ids, and the ids."""
        return 3 + self._samples

    def _write_entries(self, partial: PartialStep, numbers: array[float], first: int, width: int) -> None:
        """Write the entries of this rank's micro-batches, with the ids where there is room.

        Args:
            partial: the step, on this rank.
            numbers: the array to write to.
            first: the place of micro-batch 0's entry.
            width: the distance from one entry to the next.
        """
        if self._member.shard != self._member.reporting:
            return
        for k in partial.done[-1]:
            ids = partial.samples[k]
            written = ids if len(ids) <= self._samples else []
            entry = array("d", [partial.losses[k], partial.tokens.get(k, 0.0), len(ids), *written])
            place = first + k * width
            numbers[place : place + len(entry)] = entry

    def _account(self, partial: PartialStep, entries: list[list[float]]) -> StepAccount:
        """Return the account from the sum of all ranks' entries."""
        most = max(int(number) for _, _, number, *_ in entries)
        if most > self._samples:
            self._samples = most
            width = self._entry_width
            numbers = _zeros(partial.micro_batches * width)
            self._write_entries(partial, numbers, 0, width)
            summed = self._sum(numbers)
            entries = [summed[i : i + width] for i in range(0, len(summed), width)]
        tokens = math.fsum(number for _, number, *_ in entries)
        if tokens:
            loss = math.fsum(loss * number for loss, number, *_ in entries) / tokens
        else:
            loss = math.fsum(loss for loss, *_ in entries) / len(entries)
        return StepAccount(loss, [int(i) for _, _, number, *ids in entries for i in ids[: int(number)]], tokens)


class _Counts:
    """How often each micro-batch was computed, counted for each model shard, and each of its model chunks, on its own.

    The counts of several of them share a number, as its digits in a base above the number of replicas: no rank counts a
    micro-batch twice.
    """

    def __init__(self, member: Member) -> None:
        self._base = member.replicas + 1
        self._in_column = int(EXACT_BITS / math.log2(self._base))
        self.columns = -(-member.shards * member.chunks // self._in_column)
        """Number of numbers in a row."""
        self._shard, self._chunks = member.shard, member.chunks

    def write(self, done: Sequence[Collection[int]], numbers: array[float], first: int, width: int) -> None:
        """Count what each of this rank's chunks has done.

        Args:
            done: for each chunk, its micro-batches.
            numbers: the array to write to.
            first: the place of the first column of micro-batch 0.
            width: the distance from one micro-batch to the next.
        """
        for chunk, computed in enumerate(done):
            column, digit = self._place(self._shard, chunk)
            for k in computed:
                numbers[first + k * width + column] += float(self._base**digit)

    def _place(self, shard: int, chunk: int) -> tuple[int, int]:
        """Return the column and the digit in which a chunk is counted."""
        return divmod(shard * self._chunks + chunk, self._in_column)

    def check(self, rows: list[list[float]], shard: int, chunk: int, step: int) -> None:
        """Check the counts of a shard's chunk; each of ``rows`` begins with the sums over all ranks.

        Raises:
            SampleAccountingError: a micro-batch was not computed exactly once.
        """
        column, digit = self._place(shard, chunk)
        unit = self._base**digit
        counts = [int(row[column]) // unit % self._base for row in rows]
        wrong = {k: count for k, count in enumerate(counts) if count != 1}
        if wrong:
            raise SampleAccountingError(f"step {step}: times computed, by micro-batch: {wrong}")


def _zeros(numbers: int) -> array[float]:
    """Return an array of zeros of type float64."""
    return array("d", bytes(8 * numbers))


def _worst(levels: list[float]) -> list[int]:
    """Return the largest level of each status at which there is a rank."""
    return [max(level for level in range(LEVELS) if levels[first + level]) for first in range(0, len(levels), LEVELS)]
