"""The agreement of a new generation's members on an interrupted step. Pure functions of what each member reports.

Every member evaluates these functions on the same gathered reports, so all come to the same answer without a further
round of communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unicron.accounting import DONE, FREE, KeptGradients, MicroBatchesOfChunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one member has when it joins a generation."""

    coordinate: tuple[int, int]
    """Tensor- and pipeline-parallel rank: which shard of the model."""
    replica: int = 0
    """Data-parallel rank: which replica of the model the member belongs to."""
    complete: int = -1
    """The version (updates applied) of which the member has all that its place needs; -1: it has none."""
    partial: int
    """The step that the member has begun; 0: none."""
    generation: int = 0
    """The generation in which the member last agreed with others on that step."""
    accounted: bool = False
    """Whether the member knows the account (losses and samples) of the whole step."""
    reduced: int = 0
    """How many buckets of gradients, from the first, the member has reduced."""
    buckets: int = 1
    """How many buckets there are; the same for all members with the same shard."""
    identity: int = 0
    """Digest of what the member is beside its state (``unicron.join.identity``)."""
    proven: bool = False
    """Whether the member has trained in a generation before, and so has been compared with others."""
    uncompared: bool = False
    """Whether a newcomer had a part in the member's newest update, behind which nothing was compared."""
    undoes: bool = False
    """Whether the member knows that the newest update is to be undone: a member that had a part in it differs."""
    open_section: int = 0
    """The step behind which the member is in a boundary section that is not done; 0: none."""
    step_micro_batches: int = 0
    """Micro-batches of the begun step, over all replicas."""
    last_step: int = 0
    """The step behind which the training ends: an earlier one than the others know, where it has agreed to end."""
    micro_batches: tuple[tuple[int, ...], ...] = ((),)
    """The state of each micro-batch of that step (``FREE``, ``ASSIGNED`` or ``DONE``), for each model chunk, of which
    all members have equally many. The buckets that are not reduced contain the sum of the gradients of those done."""

    def done(self) -> MicroBatchesOfChunks:
        """Return the micro-batches that are done, for each model chunk."""
        return tuple(frozenset(k for k, state in enumerate(states) if state == DONE) for states in self.micro_batches)

    def taken(self) -> frozenset[int]:
        """Return the micro-batches that are assigned to the member's replica, or done by some chunk."""
        return frozenset(k for states in self.micro_batches for k, state in enumerate(states) if state != FREE)


def common_version(reports: Sequence[Report]) -> int:
    """Return the version of which every member has all that its place needs; -1 if there is none."""
    versions = {report.complete for report in reports}
    return versions.pop() if len(versions) == 1 else -1


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
    nothing: MicroBatchesOfChunks = (frozenset(),) * len(reports[ranks[0]].micro_batches)
    if not begun:
        return KeptGradients(reduced_by_rank=dict.fromkeys(ranks, 0), kept_by_rank=dict.fromkeys(ranks, nothing))
    newest = max(reports[rank].generation for rank in begun)
    current = [rank for rank in begun if reports[rank].generation == newest]
    reduced = max(reports[rank].reduced for rank in current)
    kept: dict[int, MicroBatchesOfChunks] = dict.fromkeys(ranks, nothing)
    counted = nothing
    for rank in sorted(begun, key=lambda rank: (-reports[rank].generation, rank)):
        done = reports[rank].done()
        overlaps = any(own & others for own, others in zip(done, counted, strict=True))
        if (rank in current or reports[rank].reduced == 0) and not overlaps:
            kept[rank] = done
            counted = tuple(own | others for own, others in zip(done, counted, strict=True))
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

    A pass then adds to the sums of every shard of its replica, also of a shard that has counted the micro-batch
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
    counted: set[int] = set()
    for replica in sorted(shards, key=lambda replica: (-min(reports[r].generation for r in shards[replica]), replica)):
        own, *others = (done(rank) for rank in shards[replica])
        if own is not None and all(other == own for other in others) and not own & counted:
            of_replica[replica] = own
            counted |= own
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
    micro-batches that its shard has not counted. If the gradient buffers are the sums, it adds those of all, unless the
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

    A micro-batch is missing if a shard that has unreduced buckets has a model chunk that has not counted it. A replica
    goes on with the missing micro-batches that it had been assigned. The others are dealt in order, each to the replica
    with the least left to compute (the lowest of equals): round-robin where all have equally much left.
    """
    kept = {c: kept_gradients(reports, step, c) for c in sorted({report.coordinate for report in reports})}
    if in_place:
        kept = equal_over_replicas(reports, step, kept)
    every = frozenset(range(micro_batches))
    missing: set[int] = set().union(*(every - c for k in kept.values() if not k.is_complete for c in k.counted))
    owner: dict[int, int] = {}
    for report in sorted(reports, key=lambda report: report.replica):
        if report.partial == step:
            for k in report.taken() & missing:
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
