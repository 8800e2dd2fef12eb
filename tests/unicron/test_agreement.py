"""The agreement's functions, over any history of reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron.agreement import ASSIGNED, DONE, FREE, Report, deal, kept, newest_state, share

reports = st.integers(1, 12).flatmap(
    lambda m: st.lists(
        st.builds(
            Report,
            coordinate=st.just((0, 0)),
            applied=st.integers(-1, 3),
            partial=st.integers(0, 4),
            micro_batches=st.lists(st.sampled_from([FREE, ASSIGNED, DONE]), min_size=m, max_size=m).map(tuple),
        ),
        min_size=1,
        max_size=6,
    )
)


@given(reports)
def test_every_micro_batch_is_dealt_exactly_once(members: list[Report]) -> None:
    count = len(members[0].micro_batches)
    dealt = deal(members, 3, count)
    assert sorted(k for ks in dealt for k in ks) == list(range(count))


@given(reports)
def test_what_is_finished_and_counts_stays_with_who_finished_it(members: list[Report]) -> None:
    dealt = deal(members, 3, len(members[0].micro_batches))
    finished = kept(members, 3)
    for ks, done, report in zip(dealt, finished, members, strict=True):
        assert done <= set(ks)
        assert not done or done == {k for k, state in enumerate(report.micro_batches) if state == DONE}


@given(reports)
def test_the_newest_held_step_wins(members: list[Report]) -> None:
    agreed = newest_state(members)
    assert agreed.step == max(report.applied for report in members)
    if agreed.step >= 0:
        assert members[agreed.sources[(0, 0)]].applied == agreed.step
        assert all((rank in agreed.takers) == (r.applied != agreed.step) for rank, r in enumerate(members))


def test_a_step_counts_only_where_every_shard_is_held() -> None:
    def at(tensor: int, applied: int) -> Report:
        return Report(coordinate=(tensor, 0), applied=applied, partial=0)

    agreed = newest_state([at(0, 5), at(1, 4), at(0, 4), at(1, -1)])
    assert (agreed.step, dict(agreed.sources), agreed.takers) == (4, {(0, 0): 2, (1, 0): 1}, frozenset({0, 3}))
    assert newest_state([at(0, 5), at(1, 4)]).step == -1


def test_twelve_over_five_after_one_of_six_is_lost() -> None:
    members = []
    for rank in (0, 1, 2, 4, 5):
        states = [FREE] * 12
        for k in share(rank, 6, 12):
            states[k] = DONE
        members.append(Report(coordinate=(0, 0), applied=2, partial=3, micro_batches=tuple(states)))
    assert deal(members, 3, 12) == [[0, 3, 6], [1, 7, 9], [2, 8], [4, 10], [5, 11]]
