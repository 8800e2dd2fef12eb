"""What the members of a new generation agree on, as pure functions of what each of them reports.

Every member evaluates these on the same gathered reports, so all come to the same answer without another round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FREE, ASSIGNED, DONE = 0, 1, 2
"""A micro-batch as one rank reports it: not its own, its own but not computed, computed and accumulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one member holds when it joins."""

    coordinate: tuple[int, int]
    """Tensor- and pipeline-parallel rank: which shard of the model."""
    replica: int = 0
    """Data-parallel rank: which replica of the model it computes with."""
    complete: int = -1
    """The step (updates applied) of which it holds everything its place needs; -1: of none."""
    partial: int
    """The step it has begun, 0 if none."""
    generation: int = 0
    """The generation in which it last agreed with others on that step."""
    accounted: bool = False
    """Whether it knows losses and samples of the whole step."""
    reduced: int = 0
    """How many buckets of gradients, from the first, it holds reduced."""
    buckets: int = 1
    """How many there are; the same for all that hold the same shard."""
    micro_batches: tuple[int, ...] = ()
    """For that step, ``FREE``, ``ASSIGNED`` or ``DONE`` for each micro-batch: the buckets that are not reduced hold
    the sum of the gradients of those done."""


def all_complete(reports: Sequence[Report]) -> int:
    """Return the step of which every member holds everything its place needs; -1 if there is none."""
    steps = {report.complete for report in reports}
    return steps.pop() if len(steps) == 1 else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What the holders of one shard keep of an interrupted step."""

    generation: int = 0
    """The newest in which any of them agreed on the step; 0: none has begun it."""
    reduced: int = 0
    """Buckets, from the first, that are reduced and need nothing more."""
    whole: bool = False
    """Whether those are all buckets."""
    source: int = -1
    """The lowest rank that holds them; -1: there are none."""
    have: Mapping[int, int] = field(default_factory=dict)
    """For each rank, how many of them it holds; it takes the others from the source."""
    kept: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """For each rank, the finished micro-batches that count: their gradients are in its buckets not yet reduced."""

    @property
    def counted(self) -> frozenset[int]:
        """The micro-batches that some rank keeps."""
        return frozenset().union(*self.kept.values())


def shard(reports: Sequence[Report], step: int, coordinate: tuple[int, int]) -> Shard:
    """Return what the holders of a shard keep of ``step``.

    A reduced bucket is the sum over the whole batch, so one rank that holds it is enough: the others take it. Two
    reductions of one bucket in two generations may differ by rounding, so only those that the members of the newest
    generation hold count, and a rank that was not in it (thought lost, it comes back) keeps its micro-batches only if
    it has reduced nothing. A rank whose micro-batches overlap another's keeps none: a sum cannot give a part of it
    back.
    """
    ranks = [rank for rank, report in enumerate(reports) if report.coordinate == coordinate]
    begun = [rank for rank in ranks if reports[rank].partial == step]
    if not begun:
        return Shard(have=dict.fromkeys(ranks, 0), kept=dict.fromkeys(ranks, frozenset()))
    newest = max(reports[rank].generation for rank in begun)
    current = [rank for rank in begun if reports[rank].generation == newest]
    reduced = max(reports[rank].reduced for rank in current)
    kept: dict[int, frozenset[int]] = dict.fromkeys(ranks, frozenset())
    taken: set[int] = set()
    for rank in sorted(begun, key=lambda rank: (-reports[rank].generation, rank)):
        done = frozenset(k for k, state in enumerate(reports[rank].micro_batches) if state == DONE)
        if (rank in current or reports[rank].reduced == 0) and not done & taken:
            kept[rank] = done
            taken |= done
    return Shard(
        generation=newest,
        reduced=reduced,
        whole=reduced == reports[begun[0]].buckets,
        source=next(rank for rank in current if reports[rank].reduced == reduced) if reduced else -1,
        have={rank: reports[rank].reduced if rank in current else 0 for rank in ranks},
        kept=kept,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How the members complete an interrupted step."""

    shards: Mapping[tuple[int, int], Shard]
    work: Sequence[tuple[int, ...]]
    """For each replica, the micro-batches it computes. A rank adds the gradients of those its shard has not counted."""
    accountant: int
    """The lowest rank that knows losses and samples of the whole step; -1: none does."""


def deal(reports: Sequence[Report], step: int, micro_batches: int) -> Deal:
    """Return what the members keep of ``step`` and who computes what is missing.

    Missing is a micro-batch that some shard has neither counted nor has no more use for, all its buckets being
    reduced. A replica goes on with those it had been given; the rest is dealt in order, each to the replica with the
    least to do (the lowest of equals): round-robin when all have equal work left.
    """
    shards = {c: shard(reports, step, c) for c in sorted({report.coordinate for report in reports})}
    missing = set().union(*(set(range(micro_batches)) - s.counted for s in shards.values() if not s.whole))
    owner: dict[int, int] = {}
    for report in sorted(reports, key=lambda report: report.replica):
        if report.partial == step:
            for k, state in enumerate(report.micro_batches):
                if state != FREE and k in missing:
                    owner.setdefault(k, report.replica)
    work: list[list[int]] = [[] for _ in range(1 + max(report.replica for report in reports))]
    for k, replica in owner.items():
        work[replica].append(k)
    for k in sorted(missing - owner.keys()):
        min(work, key=len).append(k)
    accountants = [rank for rank, report in enumerate(reports) if report.partial == step and report.accounted]
    return Deal(shards=shards, work=[tuple(sorted(ks)) for ks in work], accountant=min(accountants, default=-1))


def share(rank: int, size: int, micro_batches: int) -> list[int]:
    """Return the micro-batches of one of ``size`` replicas in a step that nothing has interrupted: round-robin."""
    return list(range(rank, micro_batches, size))
