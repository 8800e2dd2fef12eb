"""What a rank keeps of a step in progress, and the digest of samples."""

from __future__ import annotations

import hashlib
import struct

from unicron.accounting import (
    EMPTY_DIGEST,
    KeptGradients,
    PartialStep,
    bits_of,
    chain_digest,
    micro_batches_of,
)
from unicron.join.agreement import Report
from unicron.join.dealing import Deal


def test_the_digest_is_sha256_over_the_digest_before_and_little_endian_ids() -> None:
    ids = [0, 1, -2, 2**40]
    assert chain_digest(EMPTY_DIGEST, ids) == hashlib.sha256(bytes(32) + struct.pack("<4q", *ids)).digest()
    once = chain_digest(EMPTY_DIGEST, [1])
    assert chain_digest(once, [2]) == hashlib.sha256(once + struct.pack("<q", 2)).digest()


def test_what_remains_and_what_is_finished() -> None:
    partial = PartialStep(
        step=1, assigned=[1, 3], micro_batches=5, samples={1: [7], 4: [9]}, done=[{1, 4}], computed=[{1}]
    )
    assert (partial.remaining(), partial.finished()) == ([3], {1, 4})


def test_what_remains_is_what_some_chunk_has_not_computed() -> None:
    partial = PartialStep.begin(1, [1, 3], generation=1, chunks=2, micro_batches=4)
    partial.done[1], partial.computed[1] = {1, 3}, {1, 3}
    partial.done[0], partial.computed[0] = {1}, {1}
    assert (partial.remaining(), partial.finished()) == ([3], {1})


def test_bits_are_those_of_the_micro_batches() -> None:
    for micro_batches in (frozenset[int](), frozenset({0}), frozenset({1, 62, 63, 64, 2047})):
        assert bits_of(micro_batches) == sum(2**k for k in micro_batches)
        assert micro_batches_of(bits_of(micro_batches)) == micro_batches


def test_a_rank_accounts_for_what_it_kept_and_what_it_computes() -> None:
    kept = {
        (0, 0): KeptGradients(kept_by_rank={0: (frozenset({5, 1}),), 1: (frozenset(),)}),
        (1, 0): KeptGradients(kept_by_rank={2: (frozenset({2}),)}),
    }
    dealt = Deal(kept=kept, assigned=[(3,), (0, 4)], accountant=-1)
    assert dealt.computed_by(0, Report(coordinate=(0, 0), replica=0, partial=1)) == [1, 3, 5]
    assert dealt.computed_by(2, Report(coordinate=(1, 0), replica=1, partial=1)) == [0, 2, 4]
