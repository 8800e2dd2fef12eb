"""Intervals: what sets of them cover, second by second."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.costs.intervals import Interval, is_within, outside, overlapping, take, union

LAST_S = 30
intervals = st.tuples(st.integers(0, LAST_S), st.integers(0, LAST_S)).map(lambda pair: (float(pair[0]), float(pair[1])))
lasting = intervals.filter(lambda interval: interval[0] < interval[1])
sets = st.lists(lasting, max_size=8).map(union)


def seconds(covered: Sequence[Interval]) -> set[int]:
    """Return the seconds up to the last one that intervals cover."""
    return {second for second in range(LAST_S) for start, end in covered if start <= second < end}


def assert_set(found: list[Interval]) -> None:
    bounds = [bound for interval in found for bound in interval]
    assert bounds == sorted({*bounds})  # in order, and none touches the next


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(lasting, max_size=8))
def test_a_union_covers_what_any_interval_covers(given_intervals: list[Interval]) -> None:
    assert_set(union(given_intervals))
    assert seconds(union(given_intervals)) == seconds(given_intervals)


@settings(deadline=None)
@given(sets, lasting)
def test_a_set_is_cut_and_turned_inside_out(covered: list[Interval], within: Interval) -> None:
    assert seconds(outside(covered)) == {*range(LAST_S)} - seconds(covered)
    assert seconds(list(overlapping(covered, *within))) == seconds(covered) & seconds([within])


@settings(deadline=None)
@given(sets, intervals)
def test_a_set_covers_an_interval_if_it_covers_all_of_its_seconds(covered: list[Interval], one: Interval) -> None:
    assert is_within(one, covered) == (seconds([one]) <= seconds(covered))
    assert is_within(one, outside(covered)) == (not seconds([one]) & seconds(covered))


@settings(deadline=None)
@given(sets, lasting)
def test_what_is_taken_was_free_and_is_not_any_more(covered: list[Interval], one: Interval) -> None:
    taken = list(covered)
    free = take(one, taken)
    assert_set(list(free))
    assert seconds(free) == seconds([one]) - seconds(covered)
    assert_set(taken)
    assert seconds(taken) == seconds(covered) | seconds([one])
