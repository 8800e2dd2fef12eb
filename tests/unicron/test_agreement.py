"""The agreement about an interrupted step, for arbitrary reports of the ranks."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.accounting import bits_of, micro_batches_of
from unicron.join.agreement import Report, common_version
from unicron.join.dealing import Deal, deal, kept_gradients, share

STEP = 3
BUCKETS = 3


examples = settings(deadline=None, derandomize=True)


def done_of(report: Report) -> tuple[set[int], ...]:
    """Return the micro-batches that each model chunk has done."""
    return tuple(set(micro_batches_of(bits)) for bits in report.done_bits)


@st.composite
def histories(draw: st.DrawFn) -> list[Report]:
    """Draw reports of all ranks; each is consistent in itself, but not with the others."""
    micro_batches = draw(st.integers(1, 8))
    tensor, pipeline = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    replicas = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 2))
    reports = []
    for stage in range(pipeline):
        for replica in range(replicas):
            for slice_ in range(tensor):
                reduced = draw(st.integers(0, BUCKETS))
                bits = st.integers(0, 2**micro_batches - 1)
                reports.append(
                    Report(
                        coordinate=(slice_, stage),
                        replica=replica,
                        partial=draw(st.integers(0, 4)),
                        generation=draw(st.integers(1, 3)),
                        accounted=reduced > 0 or draw(st.booleans()),
                        reduced=reduced,
                        buckets=BUCKETS,
                        step_micro_batches=micro_batches,
                        assigned_bits=draw(bits),
                        done_bits=draw(st.tuples(*[bits] * chunks)),
                    )
                )
    return reports


def carried_out(reports: list[Report], agreed: Deal, micro_batches: int, *, in_place: bool) -> list[list[int]]:
    """Return the micro-batches in the final sums of each model shard, chunk and bucket; what is added twice, twice.

    In place a pass adds to each of them, and what was reduced before is set aside.
    """
    sums = []
    for coordinate, part in agreed.kept.items():
        for chunk, counted in enumerate(part.kept):
            for bucket in range(BUCKETS):
                if bucket < part.reduced:
                    sums.append(list(range(micro_batches)))
                    continue
                total: list[int] = []
                for rank, report in enumerate(reports):
                    if report.coordinate == coordinate:
                        total += part.kept_by_rank[rank][chunk]
                        total += [k for k in agreed.assigned[report.replica] if in_place or k not in counted]
                sums.append(sorted(total))
    return sums


@examples
@given(histories(), st.booleans())
def test_every_bucket_has_every_micro_batch_exactly_once(reports: list[Report], in_place: bool) -> None:
    count = reports[0].step_micro_batches
    agreed = deal(reports, STEP, count, in_place=in_place)
    for total in carried_out(reports, agreed, count, in_place=in_place):
        assert total == list(range(count))


@examples
@given(histories(), st.booleans())
def test_nothing_is_computed_that_no_shard_needs(reports: list[Report], in_place: bool) -> None:
    count = reports[0].step_micro_batches
    agreed = deal(reports, STEP, count, in_place=in_place)
    work = [k for ks in agreed.assigned for k in ks]
    assert len(work) == len(set(work))
    for k in work:
        assert any(not part.is_complete and any(k not in c for c in part.kept) for part in agreed.kept.values())


@examples
@given(histories())
def test_a_replica_keeps_in_place_what_all_its_shards_have(reports: list[Report]) -> None:
    """And keeps it if no other replica has any of it, in the usual case: all have been in the newest generation."""
    reports = [dataclasses.replace(report, partial=STEP, generation=1) for report in reports]
    agreed = deal(reports, STEP, reports[0].step_micro_batches, in_place=True)
    done: dict[int, set[frozenset[int]]] = {}
    for report in reports:
        if not agreed.kept[report.coordinate].is_complete:
            done.setdefault(report.replica, set()).update(report.done())
    for rank, report in enumerate(reports):
        part = agreed.kept[report.coordinate]
        if part.is_complete:
            continue
        sets = done[report.replica]
        others = {k for replica, ones in done.items() if replica != report.replica for one in ones for k in one}
        if len(sets) > 1:
            assert not any(part.kept_by_rank[rank])
        elif not others.intersection(*sets):
            assert set(part.kept_by_rank[rank]) == sets


@examples
@given(histories())
def test_kept_gradients_are_those_that_their_ranks_have(reports: list[Report]) -> None:
    for coordinate in {report.coordinate for report in reports}:
        part = kept_gradients(reports, STEP, coordinate)
        for rank, done in part.kept_by_rank.items():
            report = reports[rank]
            # In all of its chunks or in none.
            assert not any(done) or done == done_of(report)
            # The reduction of a bucket overwrites the rank's own sums in it.
            assert not any(done) or report.partial == STEP
            assert not any(done) or report.reduced <= part.reduced
        if part.source >= 0:
            source = reports[part.source]
            assert (source.partial, source.generation, source.reduced) == (STEP, part.generation, part.reduced)
        for rank, have in part.reduced_by_rank.items():
            assert have <= part.reduced
            assert have == 0 or reports[rank].generation == part.generation


@examples
@given(histories())
def test_buckets_of_an_older_generation_do_not_count(reports: list[Report]) -> None:
    """Two reductions of one bucket may differ by rounding, but all replicas need the same sums."""
    older = [dataclasses.replace(report, generation=1) for report in reports]
    newer = dataclasses.replace(reports[0], partial=STEP, generation=2, reduced=0)
    part = kept_gradients([newer, *older[1:]], STEP, newer.coordinate)
    assert (part.generation, part.reduced, part.source) == (2, 0, -1)
    assert part.kept_by_rank[0] == done_of(newer)


def test_a_reduced_bucket_of_a_single_rank_is_kept() -> None:
    def survivor(replica: int, reduced: int) -> Report:
        return Report(
            coordinate=(0, 0), replica=replica, partial=STEP, generation=1, accounted=reduced > 0,
            reduced=reduced, buckets=BUCKETS, done_bits=(bits_of(share(replica, 3, 6)),),
        )  # fmt: skip

    agreed = deal([survivor(0, 1), survivor(1, 2)], STEP, 6, in_place=False)
    part = agreed.kept[0, 0]
    assert (part.reduced, part.is_complete, part.source, part.reduced_by_rank) == (2, False, 1, {0: 1, 1: 2})
    assert (agreed.assigned, agreed.accountant) == ([(2,), (5,)], 0)
    done = deal([survivor(0, 0), survivor(1, BUCKETS)], STEP, 6, in_place=False)
    assert (done.kept[0, 0].is_complete, done.assigned, done.accountant) == (True, [(), ()], 1)


def test_twelve_over_five_after_one_of_six_is_lost() -> None:
    shares = [bits_of(share(rank, 6, 12)) for rank in (0, 1, 2, 4, 5)]
    members = [
        Report(coordinate=(0, 0), replica=replica, partial=STEP, generation=1, done_bits=(bits,))
        for replica, bits in enumerate(shares)
    ]
    assert deal(members, STEP, 12, in_place=False).assigned == [(3,), (9,), (), (), ()]
    started = [dataclasses.replace(m, assigned_bits=m.done_bits[0], done_bits=(0,)) for m in members]
    assert deal(started, STEP, 12, in_place=False).assigned == [(0, 3, 6), (1, 7, 9), (2, 8), (4, 10), (5, 11)]


def test_a_chunk_that_is_ahead_keeps_what_it_has() -> None:
    """An interleaved schedule was broken off: the second chunk has done two micro-batches, the first one of them."""
    ahead = Report(coordinate=(0, 0), partial=STEP, generation=1, assigned_bits=0b111, done_bits=(0b001, 0b011))
    agreed = deal([ahead], STEP, 3, in_place=False)
    assert agreed.kept[0, 0].kept == (frozenset({0}), frozenset({0, 1}))
    assert agreed.assigned == [(1, 2)]


def test_members_with_the_same_complete_state_have_a_common_version() -> None:
    def at(complete: int) -> Report:
        return Report(coordinate=(0, 0), complete=complete, partial=0)

    assert common_version([at(4), at(4)]) == 4
    assert common_version([at(4), at(3)]) == common_version([at(4), at(-1)]) == common_version([at(-1)]) == -1
