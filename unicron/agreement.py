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
    applied: int
    """Updates applied to the state it holds; -1 if it holds none."""
    partial: int
    """The step it has begun, 0 if none."""
    micro_batches: tuple[int, ...] = ()
    """For that step, ``FREE``, ``ASSIGNED`` or ``DONE`` for each micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What follows from the reports."""

    step: int
    """Updates applied in the state everyone will hold; -1 if nobody holds a complete state."""
    sources: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """For each shard, the lowest rank that holds it at ``step``."""
    takers: frozenset[int] = frozenset()
    """Ranks that take their state from their shard's source."""


def newest_state(reports: Sequence[Report]) -> Agreement:
    """Return the newest step of which every shard is held by some rank, and who gives to whom."""
    coordinates = {report.coordinate for report in reports}
    for step in sorted({report.applied for report in reports if report.applied >= 0}, reverse=True):
        sources: dict[tuple[int, int], int] = {}
        for rank, report in enumerate(reports):
            if report.applied == step:
                sources.setdefault(report.coordinate, rank)
        if set(sources) == coordinates:
            takers = frozenset(rank for rank, report in enumerate(reports) if report.applied != step)
            return Agreement(step=step, sources=sources, takers=takers)
    return Agreement(step=-1)


def kept(reports: Sequence[Report], step: int) -> list[frozenset[int]]:
    """Return, for each rank, the finished micro-batches of ``step`` that count.

    A rank whose finished micro-batches overlap a lower rank's keeps nothing (one sum cannot give back a part of it):
    that happens when a rank thought lost, whose work was dealt again, comes back.
    """
    taken: set[int] = set()
    answer = []
    for report in reports:
        done = frozenset(k for k, state in enumerate(report.micro_batches) if state == DONE)
        if report.partial != step or done & taken:
            done = frozenset()
        taken |= done
        answer.append(done)
    return answer


def deal(reports: Sequence[Report], step: int, micro_batches: int) -> list[list[int]]:
    """Return, for each rank, the micro-batches of ``step`` that are its own, finished ones included.

    A rank keeps what it has finished and, of what it had been given, what nobody else finished. The rest is dealt in
    order, each to the rank with the least left to do (the lowest of equals): round-robin when all have equal work
    left.
    """
    finished = kept(reports, step)
    owner: dict[int, int] = {k: rank for rank, done in enumerate(finished) for k in done}
    left = [0] * len(reports)
    for rank, report in enumerate(reports):
        if report.partial != step:
            continue
        for k, state in enumerate(report.micro_batches):
            if state != FREE and k not in owner:
                owner[k] = rank
                left[rank] += 1
    for k in range(micro_batches):
        if k not in owner:
            rank = left.index(min(left))
            owner[k] = rank
            left[rank] += 1
    return [sorted(k for k in owner if owner[k] == rank) for rank in range(len(reports))]


def share(rank: int, size: int, micro_batches: int) -> list[int]:
    """Return the micro-batches of one of ``size`` replicas in a step that nothing has interrupted: round-robin."""
    return list(range(rank, micro_batches, size))
