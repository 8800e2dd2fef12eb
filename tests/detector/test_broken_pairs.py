"""The rule that says which nodes are left out: tables of who reaches whom, and properties of all such tables."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.detector.state.pairs import Pair, broken_pairs, left_out, pair

NODES = ["n0", "n1", "n2", "n3", "n4", "n5"]


def table(nodes: list[str], *cut: tuple[str, str]) -> dict[tuple[str, str], bool]:
    """Who reaches whom if these directions are cut and all others work: a probe needs both."""
    lost = {pair(*direction) for direction in cut}
    return {(a, b): pair(a, b) not in lost for a in nodes for b in nodes if a != b}


def decided(
    reached: dict[tuple[str, str], bool], needed: set[str], need: dict[str, float] | None = None
) -> tuple[list[str], frozenset[Pair]]:
    broken = broken_pairs(reached)
    return left_out(needed, broken, need or dict.fromkeys(needed, 1.0)), broken


def test_nobody_is_left_out_where_all_reach_all() -> None:
    assert decided(table(NODES), set(NODES)) == ([], frozenset())


def test_a_node_that_most_others_cannot_reach_is_left_out_however_much_it_is_needed() -> None:
    reached = table(NODES[:4], ("n0", "n1"), ("n0", "n2"), ("n0", "n3"))
    assert decided(reached, set(NODES[:4]), {"n0": 100.0})[0] == ["n0"]


def test_nodes_without_a_rank_of_the_task_are_witnesses() -> None:
    """Of the two nodes of a task one is missed by the idle nodes as well."""
    reached = table(NODES[:4], ("n1", "n2"), ("n1", "n0"), ("n1", "n3"))
    assert decided(reached, {"n1", "n2"}, {"n1": 100.0, "n2": 1.0})[0] == ["n1"]


def test_a_pair_that_the_task_does_not_need_costs_no_node() -> None:
    assert decided(table(NODES[:4], ("n1", "n3")), {"n0", "n1", "n2"})[0] == []


@pytest.mark.parametrize(
    ("need", "out"), [({"n1": 1.0, "n2": 2.0}, "n1"), ({"n1": 2.0, "n2": 1.0}, "n2"), ({"n1": 1.0, "n2": 1.0}, "n2")]
)
@pytest.mark.parametrize("nodes", [["n1", "n2"], ["n0", "n1", "n2"]])
def test_a_pair_without_a_majority_loses_the_side_that_is_needed_less(
    nodes: list[str], need: dict[str, float], out: str
) -> None:
    assert decided(table(nodes, ("n1", "n2")), set(nodes), need)[0] == [out]


def test_of_two_halves_the_one_that_is_needed_less_is_left_out_as_a_whole() -> None:
    halves = list(itertools.product(["n0", "n1"], ["n2", "n3"]))
    reached = table(NODES[:4], *halves)
    assert decided(reached, set(NODES[:4]), {"n0": 1.0, "n1": 10.0, "n2": 3.0, "n3": 3.0})[0] == ["n2", "n3"]
    assert decided(reached, set(NODES[:4]), {"n0": 1.0, "n1": 3.0, "n2": 3.0, "n3": 3.0})[0] == ["n0", "n1"]


def test_the_smaller_side_is_left_out() -> None:
    sides = list(itertools.product(["n0", "n1"], ["n2", "n3", "n4"]))
    assert decided(table(NODES[:5], *sides), set(NODES[:5]), {"n0": 9.0, "n1": 9.0})[0] == ["n0", "n1"]


def test_one_nodes_word_isolates_nobody() -> None:
    assert broken_pairs({("n0", "n1"): False, ("n1", "n0"): True}) == frozenset()
    assert broken_pairs({("n0", "n1"): False}) == frozenset()
    assert broken_pairs({("n0", "n1"): False, ("n1", "n0"): False}) == {("n0", "n1")}


tables = st.integers(2, 6).flatmap(
    lambda count: st.fixed_dictionaries(
        {(a, b): st.sampled_from([True, False, None]) for a in NODES[:count] for b in NODES[:count] if a != b}
    )
).map(lambda drawn: {direction: got for direction, got in drawn.items() if got is not None})  # fmt: skip
"""Any answers, symmetric or not, some of them missing."""

needs = st.dictionaries(st.sampled_from(NODES), st.integers(0, 3).map(float))


examples = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@examples
@given(tables, st.sets(st.sampled_from(NODES), min_size=2), needs)
def test_who_is_left_out_of_any_table(
    reached: dict[tuple[str, str], bool], needed: set[str], need: dict[str, float]
) -> None:
    out, broken = decided(reached, needed, need)
    nodes = {node for direction in reached for node in direction}
    # Nobody is left out whom all reach that tried, and nobody who has not missed another node too.
    for node in out:
        assert not all(got for (_, target), got in reached.items() if target == node)
        assert not all(got for (source, _), got in reached.items() if source == node)
    # The nodes that are kept reach one another, as far as the pairs are known to be broken or not.
    kept = (needed & nodes) - set(out)
    for a, b in itertools.combinations(sorted(kept), 2):
        assert (a, b) not in broken
    # Nobody is left out for nothing: one of its broken pairs is with a needed node.
    assert all(any(pair(node, other) in broken for other in needed) for node in out)
    # Only the table counts, and not its order.
    again = dict(reversed(reached.items()))
    assert decided(again, needed, need) == (out, broken)


@examples
@given(tables)
def test_a_probe_that_gets_through_settles_its_pair(reached: dict[tuple[str, str], bool]) -> None:
    broken = broken_pairs(reached)
    assert not any(pair(*direction) in broken for direction, got in reached.items() if got)
