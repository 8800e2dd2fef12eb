"""The account of a step: what has been done of it, and by which rank. Pure.

A rank keeps a ``PartialStep`` for the step in progress; it outlives the loss of peers. Before gradients are reduced all
ranks agree on a ``StepAccount``. The members of a new generation agree on the ``KeptGradients`` of each model shard
(``unicron.join.dealing``).

The backward passes of the model chunks of an interleaved pipeline end at different times, so what is done is noted for
each chunk. Any other model is one chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

MicroBatchesOfChunks = tuple[frozenset[int], ...]
"""A set of micro-batches for each model chunk of a rank."""

EMPTY_DIGEST = bytes(32)
"""The digest of samples before the first update."""


def bits_of(micro_batches: Iterable[int]) -> int:
    """Return a number that has the bits of some micro-batches set."""
    found = 0
    for k in micro_batches:
        found |= 1 << k
    return found


@lru_cache(maxsize=4096)  # the ranks of a replica mostly have the same
def micro_batches_of(bits: int) -> frozenset[int]:
    """Return the micro-batches whose bits are set in a number."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return frozenset(found)


def chain_digest(digest: bytes, sample_ids: list[int]) -> bytes:
    """Return the digest of samples after one more update.

    It is SHA-256 over the digest before and the sample ids of the update, in order, as little-endian int64.
    """
    return hashlib.sha256(digest + b"".join(i.to_bytes(8, "little", signed=True) for i in sample_ids)).digest()


@dataclass(frozen=True, slots=True)
class StepAccount:
    """Losses and samples of a whole step, on which the ranks agree before they reduce its gradients."""

    loss: float
    """Mean loss over the micro-batches, added up in their order; over their tokens, if those are counted."""
    sample_ids: list[int]
    """Ids of the samples, in the order of the micro-batches."""
    tokens: float = 0.0
    """Number of tokens of all micro-batches, by which their gradients are divided; 0: the training loop has scaled
    them."""


@dataclass(slots=True)
class PartialStep:
    """The step in progress on one rank."""

    step: int
    """Number of the step, counted from 1."""
    assigned: list[int]
    """The micro-batches that this rank's replica computes, since the members last agreed."""
    micro_batches: int
    """Number of micro-batches in the step, over all replicas."""
    losses: dict[int, Any] = field(default_factory=dict)
    """The losses of the micro-batches that the last chunk has done, where that chunk computes the loss: numbers, or
    tensors that are not read yet (``unicron.losses``)."""
    tokens: dict[int, Any] = field(default_factory=dict)
    """The numbers of tokens of the same micro-batches, as numbers or as tensors; empty if they do not count."""
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Sample ids of the micro-batches that some chunk has done."""
    done: list[set[int]] = field(default_factory=lambda: [set()])
    """The micro-batches whose gradients are in the sums, for each model chunk."""
    distrusted: bool = False
    """Whether a member that differs may have had a part in what is summed up: nothing of the step is kept then."""
    kept_by_shard: MicroBatchesOfChunks = (frozenset(),)
    """The micro-batches, for each model chunk, whose gradients some rank of this model shard kept when the members
    agreed. This rank computes such a micro-batch again for other shards and chunks only."""
    computed: list[set[int]] = field(default_factory=lambda: [set()])
    """The assigned micro-batches that this rank has computed since the members agreed, for each model chunk: those
    whose gradients the shard had already are not added to the sums, and so are not ``done``."""
    generation: int = 0
    """The generation in which the members last agreed on this step."""
    account: StepAccount | None = None
    """The account on which the ranks have agreed; None before that."""
    reduced: int = 0
    """How many buckets, from the first, contain the total over the whole batch."""

    @classmethod
    def begin(cls, step: int, assigned: list[int], generation: int, chunks: int, micro_batches: int) -> PartialStep:
        """Return a step of which nothing is done yet.

        Args:
            step: counts from 1.
            assigned: the micro-batches that this rank's replica computes.
            generation: the present one.
            chunks: how many model chunks the rank has.
            micro_batches: those of the step, over all replicas.
        """
        return cls(
            step=step,
            assigned=assigned,
            micro_batches=micro_batches,
            done=[set() for _ in range(chunks)],
            kept_by_shard=(frozenset(),) * chunks,
            computed=[set() for _ in range(chunks)],
            generation=generation,
        )

    def forget_done(self) -> None:
        """Forget what is done: its gradients are lost, except in the buckets that are reduced."""
        self.losses, self.tokens, self.samples = {}, {}, {}
        self.done = [set() for _ in self.done]
        self.computed = [set() for _ in self.computed]

    def remaining(self) -> list[int]:
        """Return the assigned micro-batches that are still to be computed, by some chunk at least."""
        computed = set.intersection(*self.computed)
        return [k for k in self.assigned if k not in computed]

    def finished(self) -> set[int]:
        """Return the micro-batches that all chunks have done."""
        return set.intersection(*self.done)


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
    """How many of the reduced buckets each rank has. It receives the others from the source."""
    kept_by_rank: Mapping[int, MicroBatchesOfChunks] = field(default_factory=dict)
    """The finished micro-batches of each rank that count: their gradients are in its buckets not yet reduced."""

    @property
    def kept(self) -> MicroBatchesOfChunks:
        """The micro-batches that some rank keeps."""
        return tuple(frozenset().union(*kept) for kept in zip(*self.kept_by_rank.values(), strict=True))
