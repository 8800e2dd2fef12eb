"""Who computes which micro-batches: of a step, and of what a lost rank has left of it. Pure functions.

Every member deals them out by the same gathered reports (``unicron.join.agreement``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unicron.accounting import KeptGradients, MicroBatchesOfChunks
from unicron.join.agreement import Report


def kept_gradients(reports: Sequence[Report], step: int, coordinate: tuple[int, int]) -> KeptGradients:
    """Return what the ranks of one model shard keep of ``step``.

    A reduced bucket is the sum over the whole batch, so one rank that has it is enough: the others receive it. Two
    reductions of one bucket in two generations may differ by rounding. Therefore only the buckets that members of the
    newest generation have count, and a rank that was not in that generation (it was believed lost and comes back) keeps
    its micro-batches only if it has reduced nothing. A rank of which a chunk's micro-batches overlap those of the same
    chunk of another rank keeps none: no part of a sum can be taken out of it again.
    """
    ranks = [rank for rank, report in enumerate(reports) if report.coordinate == coordinate]
    begun = [rank for rank in ranks if reports[rank].partial == step]
    nothing: MicroBatchesOfChunks = (frozenset(),) * len(reports[ranks[0]].done_bits)
    if not begun:
        return KeptGradients(reduced_by_rank=dict.fromkeys(ranks, 0), kept_by_rank=dict.fromkeys(ranks, nothing))
    newest = max(reports[rank].generation for rank in begun)
    current = [rank for rank in begun if reports[rank].generation == newest]
    reduced = max(reports[rank].reduced for rank in current)
    kept: dict[int, MicroBatchesOfChunks] = dict.fromkeys(ranks, nothing)
    kept_so_far = (0,) * len(nothing)
    for rank in sorted(begun, key=lambda rank: (-reports[rank].generation, rank)):
        done = reports[rank].done_bits
        overlaps = any(own & others for own, others in zip(done, kept_so_far, strict=True))
        if (rank in current or reports[rank].reduced == 0) and not overlaps:
            kept[rank] = reports[rank].done()
            kept_so_far = tuple(own | others for own, others in zip(done, kept_so_far, strict=True))
    return KeptGradients(
        generation=newest,
        reduced=reduced,
        is_complete=reduced == reports[begun[0]].buckets,
        source=next(rank for rank in current if reports[rank].reduced == reduced) if reduced else -1,
        reduced_by_rank={rank: reports[rank].reduced if rank in current else 0 for rank in ranks},
        kept_by_rank=kept,
    )


def equal_over_replicas(
    reports: Sequence[Report], step: int, kept: Mapping[tuple[int, int], KeptGradients]
) -> dict[tuple[int, int], KeptGradients]:
    """Return what the ranks keep of ``step`` if the gradient buffers are the sums.

    A pass then adds to the sums of every shard of its replica, also of a shard that keeps the micro-batch
    already. So a replica keeps its micro-batches if all model chunks of all its shards have the same ones, and
    otherwise none. Shards of which all buckets are reduced need nothing, and are left as they are.

    Args:
        reports: the reports of all members.
        step: the interrupted step.
        kept: what ``kept_gradients`` returns for each shard.
    """
    shards: dict[int, list[int]] = {}
    for rank, report in enumerate(reports):
        if not kept[report.coordinate].is_complete:
            shards.setdefault(report.replica, []).append(rank)

    def done(rank: int) -> frozenset[int] | None:
        """Return what a rank has done; None: nothing of it counts, or its chunks have not done the same."""
        report = reports[rank]
        first, *others = report.done()
        counts = report.generation == kept[report.coordinate].generation or report.reduced == 0
        return first if report.partial == step and counts and all(other == first for other in others) else None

    of_replica: dict[int, frozenset[int]] = dict.fromkeys(shards, frozenset())
    kept_so_far: set[int] = set()
    for replica in sorted(shards, key=lambda replica: (-min(reports[r].generation for r in shards[replica]), replica)):
        own, *others = (done(rank) for rank in shards[replica])
        if own is not None and all(other == own for other in others) and not own & kept_so_far:
            of_replica[replica] = own
            kept_so_far |= own
    found = dict(kept)
    for coordinate, part in kept.items():
        if not part.is_complete:
            of_rank = {rank: (of_replica[reports[rank].replica],) * len(one) for rank, one in part.kept_by_rank.items()}
            found[coordinate] = replace(part, kept_by_rank=of_rank)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How the members complete an interrupted step."""

    kept: Mapping[tuple[int, int], KeptGradients]
    """What the ranks keep of each model shard (tensor- and pipeline-parallel rank)."""
    assigned: Sequence[tuple[int, ...]]
    """The micro-batches that each replica computes. A rank adds, in each model chunk, the gradients of the
    micro-batches that its shard does not keep. If the gradient buffers are the sums, it adds those of all, unless the
    shard is reduced."""
    accountant: int
    """The lowest rank that knows the account of the whole step; -1: none does."""

    def computed_by(self, rank: int, report: Report) -> list[int]:
        """Return the micro-batches of the step that a rank has kept or computes."""
        return sorted({*self.assigned[report.replica]}.union(*self.kept[report.coordinate].kept_by_rank[rank]))


def deal(reports: Sequence[Report], step: int, micro_batches: int, *, in_place: bool) -> Deal:
    """Return what the members keep of ``step`` and which replica computes what is missing.

    Args:
        reports: the reports of all members.
        step: the interrupted step.
        micro_batches: the number in the step.
        in_place: whether the gradient buffers are the sums, so that a pass adds to all shards of its replica.

    A micro-batch is missing if a shard that has unreduced buckets has a model chunk that does not keep it. A replica
    goes on with the missing micro-batches that it had been assigned. The others are dealt in order, each to the replica
    with the least left to compute (the lowest of equals): round-robin where all have equally much left.
    """
    kept = {c: kept_gradients(reports, step, c) for c in sorted({report.coordinate for report in reports})}
    if in_place:
        kept = equal_over_replicas(reports, step, kept)
    every = frozenset(range(micro_batches))
    missing: set[int] = set().union(*(every - c for k in kept.values() if not k.is_complete for c in k.kept))
    owner: dict[int, int] = {}
    for report in sorted(reports, key=lambda report: report.replica):
        if report.partial == step:
            for k in report.assigned_or_done() & missing:
                owner.setdefault(k, report.replica)
    assigned: list[list[int]] = [[] for _ in range(1 + max(report.replica for report in reports))]
    for k, replica in owner.items():
        assigned[replica].append(k)
    for k in sorted(missing - owner.keys()):
        min(assigned, key=len).append(k)
    accountants = [rank for rank, report in enumerate(reports) if report.partial == step and report.accounted]
    return Deal(kept=kept, assigned=[tuple(sorted(ks)) for ks in assigned], accountant=min(accountants, default=-1))


def share(replica: int, replicas: int, micro_batches: int, shares: Sequence[int] = ()) -> list[int]:
    """Return the micro-batches of one of several replicas in a step that nothing has interrupted.

    They are dealt round-robin: each round, in order, to the replicas that have less than their share.

    Args:
        replica: the number of the replica.
        replicas: the number of replicas.
        micro_batches: the number in the step.
        shares: how many each replica computes; equally many, up to one, if they are not for these replicas and all
            micro-batches.
    """
    if len(shares) != replicas or sum(shares) != micro_batches:
        return list(range(replica, micro_batches, replicas))
    # In round r, the replicas whose share is greater than r get one each: behind all rounds before, and lower replicas.
    rounds = range(shares[replica])
    return [sum(min(s, r) for s in shares) + sum(s > r for s in shares[:replica]) for r in rounds]
