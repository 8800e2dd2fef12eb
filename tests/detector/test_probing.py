"""Requests to probe, and what the detector keeps of their answers."""

from __future__ import annotations

from services.detector.nodes import probing
from services.detector.nodes.probing import DETECTOR
from shared.messages.probes import Outcome, ProbeTarget
from tests.detector.kit import Cluster, at


def heard(*, older: str = "") -> Cluster:
    """Three nodes whose agents answer probes, but for one of an older version."""
    cluster = Cluster()
    for name in cluster.names:
        cluster.beat(name, 1.0, probe="" if name == older else f"{name}:1")
    return cluster


def target(name: str) -> ProbeTarget:
    return ProbeTarget(address=f"{name}:1", incarnation=f"first {name}")


def test_witnesses_are_asked_about_others_than_themselves() -> None:
    state = heard().monitor.state
    questions = probing.ask(state, ["n0", "n1", DETECTOR], ["n1", "n2"], at(1.5))
    assert {q.witness: dict(q.peers) for q in questions} == {
        "n0": {"n1": target("n1"), "n2": target("n2")},
        "n1": {"n2": target("n2")},
        DETECTOR: {"n1": target("n1"), "n2": target("n2")},
    }
    assert {q.asked_at for q in questions} == {at(1.5)}


def test_nodes_of_an_older_version_are_neither_asked_nor_probed() -> None:
    state = heard(older="n1").monitor.state
    assert [(q.witness, *q.peers) for q in probing.ask(state, ["n0", "n1"], ["n1", "n2"], at(1.5))] == [("n0", "n2")]
    assert probing.ask(state, ["n0", "n9"], ["n1", "n9"], at(1.5)) == []


def test_the_newest_question_counts_in_whatever_order_answers_come() -> None:
    cluster = heard()
    state = cluster.monitor.state
    [first] = probing.ask(state, ["n0"], ["n2"], at(1.5))
    [second] = probing.ask(state, ["n0"], ["n2"], at(1.8))
    cluster.monitor.probed(second, {"n2": Outcome.SILENT}, at(2.0))
    cluster.monitor.probed(first, {"n2": Outcome.REACHED}, at(2.1))
    assert probing.results(state, "n2", since=at(1.4)) == {"n0": Outcome.SILENT}
    assert state.nodes["n2"].reached_at == at(1.5)
    assert probing.results(state, "n2", since=at(1.8)) == {}
    assert probing.results(state, "n1", since=at(1.4)) == {}


def test_a_witness_without_an_answer_has_found_nothing_out() -> None:
    cluster = heard()
    state = cluster.monitor.state
    for question in probing.ask(state, ["n0"], ["n1", "n2"], at(1.5)):
        cluster.monitor.probed(question, {"n1": Outcome.ABSENT}, at(1.6))
    assert probing.results(state, "n1", since=at(1.4)) == {"n0": Outcome.ABSENT}
    assert probing.results(state, "n2", since=at(1.4)) == {"n0": None}


def test_an_answer_about_an_agent_that_has_been_replaced_counts_for_nothing() -> None:
    cluster = heard()
    state = cluster.monitor.state
    [question] = probing.ask(state, ["n0"], ["n2"], at(1.5))
    cluster.beat("n2", 1.6, task=None, incarnation="second", probe="n2:2")
    cluster.monitor.probed(question, {"n2": Outcome.REACHED}, at(1.7))
    assert probing.results(state, "n2", since=at(1.0)) == {}
    assert state.nodes["n2"].reached_at is None
