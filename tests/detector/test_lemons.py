"""Lemons: nodes with more faults of their own than chance explains."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detector.incidents import causes
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, NodeJoined, NodeReturned
from shared.settings.escalation import EscalationLimits
from tests.detector.kit import START, Cluster, at
from tests.examples import examples

DAY_S = 86_400.0


def nodes(count: int) -> DetectorState:
    state = DetectorState()
    for number in range(count):
        state.nodes[f"n{number}"] = MonitoredNode(name=f"n{number}", incarnation="i", joined="j")
    return state


def failed(state: DetectorState, node: str, day: float, limits: EscalationLimits | None = None) -> ErrorDetected:
    """A device of the node fails; the node comes back afterwards."""
    name = f"{node}/{day}"
    event = ErrorDetected(
        event_id=name, incident=name, occurred_at=at(day * DAY_S), detected_at=at(day * DAY_S), kind=ErrorKind.DEVICE,
        severity=Severity.SEV1, method=Method.DEVICE, node=node,
    )  # fmt: skip
    found = causes.escalate(state, event, limits or EscalationLimits())
    assert isinstance(found, ErrorDetected)
    state.causes.add(found, Evidence.read(found.evidence))
    return found


def is_lemon(event: ErrorDetected) -> bool:
    return Evidence.read(event.evidence).rule == "lemon"


def test_a_node_that_fails_again_and_again_within_days_is_a_lemon() -> None:
    state = nodes(16)
    events = [failed(state, "n3", day) for day in (0.0, 1.0, 2.5, 3.0, 4.0)]
    assert [is_lemon(event) for event in events] == [False, False, False, False, True]
    used = events[-1].evidence["repetition"]
    assert (used["faults"], used["nodes"], used["expected"]) == (5, 16, 7 / 20)
    assert used["false_positives"] <= used["limit"] == 0.01


def test_what_hits_all_nodes_alike_makes_none_a_lemon() -> None:
    state = nodes(8)
    assert not any(is_lemon(failed(state, f"n{n}", day / 10 + n / 1000)) for day in range(12) for n in range(8))


def test_faults_that_are_days_apart_are_no_lemon() -> None:
    state = nodes(16)
    assert not any(is_lemon(failed(state, "n3", 3.0 * number)) for number in range(30))


@given(st.floats(1e-3, 30.0), st.integers(0, 40))
def test_the_tail_is_that_of_the_poisson_distribution(mean: float, least: int) -> None:
    term, terms = math.exp(-mean), []
    for index in range(400):
        terms.append(term)
        term *= mean / (index + 1)
    assert causes.poisson_tail(mean, least) == pytest.approx(math.fsum(terms[least:]), rel=1e-9, abs=1e-13)


def test_false_positives_stay_below_the_bound_where_nodes_fail_at_random() -> None:
    """Two hundred nodes over many windows, with a bound at which chance shows: 0.5 in a window are allowed."""
    draw, count, windows = random.Random(7), 200, min(examples(300), 200)
    limits = EscalationLimits(lemon_false_positives=0.5)
    state = nodes(count)
    mean_gap = 20.0 / count  # days between two faults of the cluster, with the default of mtbf_node_s
    day, lemons = 0.0, 0
    while (day := day + draw.expovariate(1 / mean_gap)) < 7.0 * windows:
        node = f"n{draw.randrange(count)}"
        if is_lemon(failed(state, node, day, limits)):
            lemons += 1
            state.causes.forget_node(node)  # an operator returns it
    assert 0 < lemons <= 0.5 * windows


def test_a_lemon_stays_out_until_an_operator_returns_it() -> None:
    cluster = Cluster(8)
    state = cluster.monitor.state
    for day in (0.0, 0.1, 0.2, 0.3, 0.4):
        event = failed(state, "n5", day / 1e5)
    assert is_lemon(event)
    cluster.fold(event)
    assert state.isolated["n5"].until_returned
    # Neither heartbeats nor a new agent bring it back.
    cluster.listen_until(10.0)
    assert cluster.beat("n5", 10.0, task=None).events == []
    found = cluster.beat("n5", 10.2, task=None, incarnation="second n5").events
    assert [type(e) for e in found] == [ErrorDetected]  # its first agent is lost
    assert cluster.beat("n5", 10.4, task=None, incarnation="second n5").events == []
    cluster.fold(NodeReturned(event_id="r", occurred_at=START, node="n5", incarnation="first n5"))
    (joined,) = cluster.beat("n5", 10.6, task=None, incarnation="second n5").events
    assert isinstance(joined, NodeJoined)
