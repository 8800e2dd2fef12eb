"""The agreement's functions, over any history of reports."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.agreement import ASSIGNED, DONE, FREE, Deal, Report, all_complete, deal, shard, share

STEP = 3
BUCKETS = 3


examples = settings(deadline=None, derandomize=True)


@st.composite
def histories(draw: st.DrawFn) -> list[Report]:
    """Any reports that ranks can give: in each of them the rank alone is consistent."""
    micro_batches = draw(st.integers(1, 8))
    tensor, pipeline = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    replicas = draw(st.integers(1, 4))
    reports = []
    for stage in range(pipeline):
        for replica in range(replicas):
            for slice_ in range(tensor):
                reduced = draw(st.integers(0, BUCKETS))
                states = st.lists(
                    st.sampled_from([FREE, ASSIGNED, DONE]), min_size=micro_batches, max_size=micro_batches
                )
                reports.append(
                    Report(
                        coordinate=(slice_, stage),
                        replica=replica,
                        partial=draw(st.integers(0, 4)),
                        generation=draw(st.integers(1, 3)),
                        accounted=reduced > 0 or draw(st.booleans()),
                        reduced=reduced,
                        buckets=BUCKETS,
                        micro_batches=tuple(draw(states)),
                    )
                )
    return reports


def carried_out(reports: list[Report], agreed: Deal, micro_batches: int) -> dict[tuple[int, int], list[list[int]]]:
    """Return, for each shard and bucket, which micro-batches are in the end in its sum, each as often as it is."""
    sums = {}
    for coordinate, part in agreed.shards.items():
        buckets = []
        for bucket in range(BUCKETS):
            if bucket < part.reduced:
                buckets.append(list(range(micro_batches)))
                continue
            total: list[int] = []
            for rank, report in enumerate(reports):
                if report.coordinate == coordinate:
                    total += part.kept[rank]
                    total += [k for k in agreed.work[report.replica] if k not in part.counted]
            buckets.append(sorted(total))
        sums[coordinate] = buckets
    return sums


@examples
@given(histories())
def test_every_bucket_holds_every_micro_batch_exactly_once(reports: list[Report]) -> None:
    count = len(reports[0].micro_batches)
    agreed = deal(reports, STEP, count)
    for buckets in carried_out(reports, agreed, count).values():
        assert buckets == [list(range(count))] * BUCKETS


@examples
@given(histories())
def test_nothing_is_computed_that_no_shard_needs(reports: list[Report]) -> None:
    count = len(reports[0].micro_batches)
    agreed = deal(reports, STEP, count)
    work = [k for ks in agreed.work for k in ks]
    assert len(work) == len(set(work))
    for k in work:
        assert any(not part.whole and k not in part.counted for part in agreed.shards.values())


@examples
@given(histories())
def test_what_counts_is_what_its_holder_has(reports: list[Report]) -> None:
    for coordinate in {report.coordinate for report in reports}:
        part = shard(reports, STEP, coordinate)
        for rank, done in part.kept.items():
            report = reports[rank]
            assert not done or done == {k for k, state in enumerate(report.micro_batches) if state == DONE}
            # The local sums of a bucket are gone once it is reduced: what counts lies in later ones.
            assert not done or report.partial == STEP
            assert not done or report.reduced <= part.reduced
        if part.source >= 0:
            source = reports[part.source]
            assert (source.partial, source.generation, source.reduced) == (STEP, part.generation, part.reduced)
        for rank, have in part.have.items():
            assert have <= part.reduced
            assert have == 0 or reports[rank].generation == part.generation


@examples
@given(histories())
def test_buckets_of_an_older_generation_do_not_count(reports: list[Report]) -> None:
    """Two reductions of one bucket may differ by rounding, and replicas must not."""
    older = [dataclasses.replace(report, generation=1) for report in reports]
    newer = dataclasses.replace(reports[0], partial=STEP, generation=2, reduced=0)
    part = shard([newer, *older[1:]], STEP, newer.coordinate)
    assert (part.generation, part.reduced, part.source) == (2, 0, -1)
    assert part.kept[0] == {k for k, state in enumerate(newer.micro_batches) if state == DONE}


def test_one_holder_of_a_reduced_bucket_is_enough() -> None:
    def survivor(replica: int, reduced: int) -> Report:
        states = [FREE] * 6
        for k in share(replica, 3, 6):
            states[k] = DONE
        return Report(
            coordinate=(0, 0), replica=replica, partial=STEP, generation=1, accounted=reduced > 0,
            reduced=reduced, buckets=BUCKETS, micro_batches=tuple(states),
        )  # fmt: skip

    agreed = deal([survivor(0, 1), survivor(1, 2)], STEP, 6)
    part = agreed.shards[0, 0]
    assert (part.reduced, part.whole, part.source, part.have) == (2, False, 1, {0: 1, 1: 2})
    assert (agreed.work, agreed.accountant) == ([(2,), (5,)], 0)
    done = deal([survivor(0, 0), survivor(1, BUCKETS)], STEP, 6)
    assert (done.shards[0, 0].whole, done.work, done.accountant) == (True, [(), ()], 1)


def test_twelve_over_five_after_one_of_six_is_lost() -> None:
    members = []
    for replica, rank in enumerate((0, 1, 2, 4, 5)):
        states = [FREE] * 12
        for k in share(rank, 6, 12):
            states[k] = DONE
        members.append(
            Report(coordinate=(0, 0), replica=replica, partial=STEP, generation=1, micro_batches=tuple(states))
        )
    assert deal(members, STEP, 12).work == [(3,), (9,), (), (), ()]
    started = [dataclasses.replace(m, micro_batches=tuple(min(s, ASSIGNED) for s in m.micro_batches)) for m in members]
    assert deal(started, STEP, 12).work == [(0, 3, 6), (1, 7, 9), (2, 8), (4, 10), (5, 11)]


def test_nothing_has_to_move_where_all_hold_the_same_step() -> None:
    def at(complete: int) -> Report:
        return Report(coordinate=(0, 0), complete=complete, partial=0)

    assert all_complete([at(4), at(4)]) == 4
    assert all_complete([at(4), at(3)]) == all_complete([at(4), at(-1)]) == all_complete([at(-1)]) == -1
