"""Inquiries in tasks of many nodes: all pairs are probed, the suspected ones first, and no listener is overrun."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detector.nodes import links
from services.detector.state.pairs import Pair, pair
from shared.events.severities import ErrorKind
from tests.detector.kit import at
from tests.detector.network import STEP_S, Links, timed
from tests.examples import examples


def names(count: int) -> list[str]:
    return [f"n{place:04d}" for place in range(count)]


@st.composite
def inquiries(draw: st.DrawFn, most: int) -> tuple[list[str], list[str], list[Pair]]:
    """The nodes of a task by rank, those that a fault names, and pairs that were broken before."""
    nodes = draw(st.permutations(names(draw(st.integers(2, most)))))
    named = st.sampled_from([*nodes, "elsewhere"])
    two = st.lists(named, min_size=2, max_size=2, unique=True).map(lambda found: pair(*found))
    return nodes, draw(st.lists(named, max_size=40)), draw(st.lists(two, max_size=5))


def in_rounds(pairs: list[Pair]) -> list[list[Pair]]:
    found = []
    while pairs:
        now, pairs = links.next_round(pairs)
        assert now
        found.append(now)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(drawn=inquiries(100), turn=st.integers(0, 5))
def test_an_inquiry_has_every_pair_once_and_no_node_has_too_many_at_a_time(
    drawn: tuple[list[str], list[str], list[Pair]], turn: int
) -> None:
    nodes, in_question, remembered = drawn
    asked = in_rounds(links.schedule(nodes, in_question, remembered, turn))
    assert sorted(itertools.chain(*asked)) == sorted(pair(*two) for two in itertools.combinations(nodes, 2))
    for one in asked:
        assert max(Counter(itertools.chain(*one)).values()) <= links.PEERS
    # The first round has all pairs if it has room for them; a few more than are needed otherwise.
    assert len(asked) <= 1 if len(nodes) <= links.PEERS else len(asked) <= 2 + 2 * len(nodes) // links.PEERS


@settings(max_examples=examples(40), deadline=None)
@given(drawn=inquiries(600))
def test_the_first_round_has_the_suspected_pairs_and_witnesses_for_each_of_their_sides(
    drawn: tuple[list[str], list[str], list[Pair]],
) -> None:
    nodes, in_question, remembered = drawn
    first = in_rounds(links.schedule(nodes, in_question, remembered, 0))[0]
    named = [node for node in dict.fromkeys(in_question) if node in nodes][: links.IN_QUESTION]
    suspected = {pair(*two) for two in itertools.combinations(named, 2)}
    suspected |= {known for known in remembered if set(known) <= set(nodes)}
    assert suspected <= set(first)
    others = Counter(itertools.chain(*first))
    sides = set(itertools.chain(*suspected))
    assert all(others[node] >= min(len(nodes) - 1, links.PEERS // 2) for node in sides)


@pytest.mark.parametrize("count", [257, 400, 1000])
def test_inquiries_in_succession_have_every_pair_of_a_very_large_task(count: int) -> None:
    nodes = names(count)
    found: set[Pair] = set()
    turns = 0
    while len(found) < count * (count - 1) // 2:
        pairs = links.schedule(nodes, [], [], turns)
        assert len(pairs) <= links.MAX_PAIRS + count
        found |= set(pairs)
        turns += 1
    assert turns <= 1 + count * count // links.MAX_PAIRS


# ---- through the detector


def stalled(nodes: int, *cut: tuple[str, str]) -> Links:
    found = timed(Links(nodes))
    found.stall()
    for two in cut:
        found.cut_pair(*two)
    return found


def errors(found: Links, limit_s: float) -> list[Any]:
    """The errors of the tick in which there are some first."""
    until = found.now_s + limit_s
    while found.now_s < until:
        if events := found.run(STEP_S):
            return events
    raise AssertionError("nothing happened")


@pytest.mark.parametrize("cut", [("n0", "n1"), ("n0", "n30"), ("n17", "n52")])
def test_a_broken_pair_of_a_large_task_is_found_wherever_its_ranks_are(cut: tuple[str, str]) -> None:
    [error] = errors(stalled(60, cut), 30.0)
    assert (error.kind, error.node, error.evidence["pairs"]) == (ErrorKind.BROKEN_LINK, cut[1], [list(cut)])


def test_of_a_large_task_the_smaller_side_of_a_broken_switch_is_left_out_at_once() -> None:
    left, right = [f"n{i}" for i in range(0, 40)], [f"n{i}" for i in range(40, 60)]
    found = errors(stalled(60, *itertools.product(left, right)), 60.0)
    assert {error.kind for error in found} == {ErrorKind.BROKEN_LINK}
    assert sorted(error.node for error in found) == sorted(right)


@pytest.mark.slow
def test_nodes_whose_sockets_broke_are_asked_about_one_another_first() -> None:
    found = timed(Links(300))
    found.run(STEP_S)
    found.cut_pair("n10", "n160")
    for name in ("n160", "n10"):
        found.cluster.monitor.feed(found.cluster.raised(f"{name}/0", found.now_s, "communication"), at(found.now_s))
    asked_before = len(found.asked)
    found.run(2 * STEP_S)
    first = found.asked[asked_before].asked_at
    peers = {question.witness: question.peers for question in found.asked if question.asked_at == first}
    assert "n160" in peers["n10"]
    assert "n10" in peers["n160"]
    [error] = errors(found, 60.0)
    assert (error.kind, error.node) == (ErrorKind.BROKEN_LINK, "n160")


def test_all_answers_of_a_large_task_are_waited_for_before_a_fault_is_judged() -> None:
    found = stalled(100)
    error = found.until_event(30.0)
    assert error.kind is ErrorKind.COLLECTIVE_TIMEOUT
    asked = {(question.witness, peer) for question in found.asked for peer in question.peers}
    assert len(asked) == 100 * 99


def test_agents_of_a_large_task_that_do_not_answer_delay_no_round_by_more_than_their_time() -> None:
    found = stalled(60)
    found.deaf = set(found.cluster.names)
    assert found.until_event(60.0).kind is ErrorKind.COLLECTIVE_TIMEOUT
    assert found.now_s <= 1.0 + 3 * (links.ANSWER_S + 2 * STEP_S)
