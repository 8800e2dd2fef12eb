"""What each member of a new generation reports, and the version of the state that all of them have. Pure functions.

Every member evaluates the functions of this module and of ``unicron.join.dealing`` on the same gathered reports, so all
come to the same answer without a further round of communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicron.accounting import MicroBatchesOfChunks, micro_batches_of


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
    assigned_bits: int = 0
    """The bit of each micro-batch of that step that is assigned to the member's replica."""
    done_bits: tuple[int, ...] = (0,)
    """The bit of each one that is done, for each model chunk, of which all members have equally many. The buckets that
    are not reduced contain the sum of the gradients of those done."""

    def done(self) -> MicroBatchesOfChunks:
        """Return the micro-batches that are done, for each model chunk."""
        return tuple(map(micro_batches_of, self.done_bits))

    def assigned_or_done(self) -> frozenset[int]:
        """Return the micro-batches that are assigned to the member's replica, or done by some chunk."""
        return micro_batches_of(self.assigned_bits).union(*self.done())


def common_version(reports: Sequence[Report]) -> int:
    """Return the version of which every member has all that its place needs; -1 if there is none."""
    versions = {report.complete for report in reports}
    return versions.pop() if len(versions) == 1 else -1
