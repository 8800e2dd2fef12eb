"""Who is missing from which collective, by the flight recorders of the ranks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.detector.progress.standstill import missing
from shared.events.evidence import MISSING_COLLECTIVES
from shared.messages.stacks import GroupRecord, Operation


def record(ranks: list[int], entered: int, *waits: int, group: str = "1") -> GroupRecord:
    named = [Operation(sequence=number, name=f"gloo:op{number}") for number in waits]
    return GroupRecord(group=group, ranks=ranks, entered=entered, waits=named)


def only(records: dict[int, list[GroupRecord]]) -> dict[str, Any]:
    (found,) = missing(records)
    return found


def test_the_rank_that_has_not_entered_is_missing() -> None:
    ranks = [0, 1, 2]
    found = only({0: [record(ranks, 6, 6)], 1: [record(ranks, 5)], 2: [record(ranks, 6, 6)]})
    assert found == {
        "collective": "gloo:op6", "group": "1", "sequence": 6, "entered": [0, 2], "missing": [1], "unknown": [],
    }  # fmt: skip


def test_of_several_under_way_the_oldest_that_waits_for_a_rank_counts() -> None:
    """Rank 1 has entered the fourth, which waits for nobody's entry, and not the fifth and sixth."""
    ranks = [0, 1]
    found = only({0: [record(ranks, 6, 4, 5, 6)], 1: [record(ranks, 4, 4)]})
    assert (found["sequence"], found["missing"]) == (5, [1])


def test_a_rank_that_did_not_answer_is_unknown_and_comes_behind_one_that_is_missing() -> None:
    records = {0: [record([0, 1], 3, 3, group="a")], 2: [record([2, 3], 8, 8, group="b")], 3: [record([2, 3], 7)]}
    records[3] = [record([2, 3], 7, group="b")]
    first, second = missing(records)
    assert (first["group"], first["missing"], first["unknown"]) == ("b", [3], [])
    assert (second["group"], second["missing"], second["unknown"]) == ("a", [], [1])


def test_a_collective_that_all_have_entered_is_reported_without_a_missing_rank() -> None:
    found = only({0: [record([0, 1], 2, 2)], 1: [record([0, 1], 2, 2)]})
    assert (found["entered"], found["missing"], found["unknown"]) == ([0, 1], [], [])


def test_groups_in_which_nobody_waits_say_nothing() -> None:
    assert missing({0: [record([0, 1], 9)], 1: [record([0, 1], 4)]}) == []


@given(
    counts=st.lists(st.integers(0, 40), min_size=2, max_size=12),
    answered=st.sets(st.integers(0, 11), min_size=1),
    groups=st.integers(1, 30),
)
def test_the_missing_are_those_with_a_lower_count(counts: list[int], answered: set[int], groups: int) -> None:
    """Each rank waits in the collective that it entered last, unless all have passed it."""
    ranks = list(range(len(counts)))
    answers = [rank for rank in ranks if rank in answered]
    records = {
        rank: [
            record(ranks, counts[rank], *([counts[rank]] if counts[rank] > min(counts) else []), group=str(number))
            for number in range(groups)
        ]
        for rank in answers
    }
    found = missing(records)
    waiting = [counts[rank] for rank in answers if counts[rank] > min(counts)]
    assert len(found) == (min(groups, MISSING_COLLECTIVES) if waiting else 0)
    for one in found:
        assert one["missing"] == [rank for rank in answers if counts[rank] < one["sequence"]]
        assert one["unknown"] == [rank for rank in ranks if rank not in answers]
        assert set(one["entered"]).isdisjoint(one["missing"])
