"""What of a step has been done, and by which rank. Pure.

A rank keeps a ``PartialStep`` for the step in progress; it outlives the loss of peers. Before gradients are reduced all
ranks agree on a ``StepAccount``. The members of a new generation agree on the ``KeptGradients`` of each model shard
(``unicron.join.agreement``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

FREE, ASSIGNED, DONE = 0, 1, 2
"""The state of a micro-batch on one rank: not the rank's own; its own and not computed; computed and accumulated."""

EMPTY_DIGEST = bytes(32)
"""The digest of samples before the first update."""


def chain_digest(digest: bytes, sample_ids: list[int]) -> bytes:
    """Return the digest of samples after one more update.

    It is SHA-256 over the digest before and the sample ids of the update, in order, as little-endian int64.
    """
    return hashlib.sha256(digest + b"".join(i.to_bytes(8, "little", signed=True) for i in sample_ids)).digest()


@dataclass(frozen=True, slots=True)
class StepAccount:
    """Losses and samples of a whole step, on which the ranks agree before they reduce its gradients."""

    loss: float
    """Mean over the micro-batches, added up in their order."""
    sample_ids: list[int]
    """In the order of the micro-batches."""


@dataclass(slots=True)
class PartialStep:
    """The step in progress on one rank."""

    step: int
    """Counts from 1."""
    assigned: list[int]
    """The micro-batches that this rank's replica computes, since the members last agreed."""
    losses: dict[int, float] = field(default_factory=dict)
    """Of the micro-batches whose gradients are in the accumulator."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Sample ids of the micro-batches whose gradients are in the accumulator."""
    counted: frozenset[int] = frozenset()
    """The micro-batches that some rank of this model shard had counted when the members agreed. This rank computes such
    a micro-batch again for other shards only."""
    computed: set[int] = field(default_factory=set)
    """The assigned micro-batches that are done."""
    generation: int = 0
    """The generation in which the members last agreed on this step."""
    account: StepAccount | None = None
    """None until the ranks have agreed on it."""
    reduced: int = 0
    """How many buckets, from the first, contain the total over the whole batch."""

    def states(self, micro_batches: int) -> list[int]:
        """Return ``FREE``, ``ASSIGNED`` or ``DONE`` for each of the step's micro-batches."""
        states = [FREE] * micro_batches
        for k in self.assigned:
            states[k] = ASSIGNED
        for k in self.samples:
            states[k] = DONE
        return states

    def remaining(self) -> list[int]:
        """Return the assigned micro-batches that are still to be computed."""
        return [k for k in self.assigned if k not in self.computed]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGradients:
    """What the ranks of one model shard keep of an interrupted step."""

    generation: int = 0
    """The newest generation in which any of the ranks agreed on the step; 0: no rank has begun it."""
    reduced: int = 0
    """How many buckets, from the first, are reduced and need nothing more."""
    is_complete: bool = False
    """Whether all buckets are reduced."""
    source: int = -1
    """The lowest rank that has the reduced buckets; -1: there are none."""
    reduced_by_rank: Mapping[int, int] = field(default_factory=dict)
    """For each rank, how many of the reduced buckets it has. It receives the others from the source."""
    kept_by_rank: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """For each rank, the finished micro-batches that count: their gradients are in its buckets not yet reduced."""

    @property
    def counted(self) -> frozenset[int]:
        """The micro-batches that some rank keeps."""
        return frozenset().union(*self.kept_by_rank.values())
