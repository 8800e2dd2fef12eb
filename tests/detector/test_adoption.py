"""Agents that a supervisor starts in place of others: their nodes are adopted with the processes that they have."""

from __future__ import annotations

from datetime import timedelta

import pytest

from services.detector.decisions.admission import Liveness
from services.detector.evolve import evolve
from services.detector.state.cluster import DetectorState
from shared.events.severities import ErrorKind
from shared.events.union import ErrorDetected, Event, NodeAdopted, NodeJoined, NodeLeft
from shared.messages.admission import Answer, Hello
from shared.messages.signals import RECONNECT_GRACE_S
from tests.detector.kit import START, Cluster, at


def supervised() -> Cluster:
    cluster = Cluster(supervised=True)
    for node in cluster.names:
        cluster.beat(node, 0.1)
    return cluster


def ask(cluster: Cluster, supervisor: str, answers: dict[str, Liveness] | None = None) -> object:
    said = Hello(node="n0", incarnation="f" * 32, addresses={}, network="elsewhere", supervisor=supervisor)
    return cluster.monitor.hello(said, answers or {}, at(1.0))


def test_a_successor_is_adopted_with_the_ranks_that_train() -> None:
    cluster = supervised()
    found = cluster.beat("n0", 1.0, incarnation="second")
    [adopted] = found.events
    assert isinstance(adopted, NodeAdopted)
    assert (adopted.node, adopted.incarnation, adopted.predecessor) == ("n0", "second", "first n0")
    assert found.cleans == []
    node = cluster.monitor.state.nodes["n0"]
    assert (node.incarnation, node.present, node.supervisor) == ("second", True, "supervisor of n0")
    assert cluster.beat("n0", 1.2, incarnation="second").events == []
    assert cluster.tick(1.3) == []


def test_the_predecessor_has_no_say_any_more() -> None:
    cluster = supervised()
    cluster.beat("n0", 1.0, incarnation="second")
    late = cluster.beat("n0", 1.1)
    assert (late.events, late.cleans) == ([], [])
    assert cluster.monitor.state.nodes["n0"].incarnation == "second"
    assert cluster.signal(cluster.exited("n0/0", 1.2), 1.2) == []
    [third] = cluster.beat("n0", 1.3, incarnation="third").events
    assert isinstance(third, NodeAdopted)
    assert cluster.beat("n0", 1.4, incarnation="second").events == []


def test_the_signals_that_wait_come_before_an_absence_counts() -> None:
    cluster = supervised()
    assert cluster.beat("n0", 1.0, incarnation="second", task=None).events  # its rank has ended meanwhile
    seconds = 1.0
    while seconds < 1.0 + RECONNECT_GRACE_S:
        seconds += 0.25
        for node in cluster.names:
            incarnation = "second" if node == "n0" else f"first {node}"
            cluster.beat(node, seconds, incarnation=incarnation, **({"task": None} if node == "n0" else {}))
        assert cluster.tick(seconds) == []
    exited = cluster.exited("n0/0", seconds, incarnation="second")
    [error] = cluster.signal(exited, seconds)
    assert isinstance(error, ErrorDetected)
    assert (error.kind, error.worker) == (ErrorKind.PROCESS_EXIT, "n0/0")


def test_an_agent_of_another_supervisor_replaces_the_node() -> None:
    cluster = supervised()
    found = cluster.beat("n0", 1.0, incarnation="second", supervisor="another", task=None)
    assert [type(event) for event in found.events] == [ErrorDetected, NodeJoined]


def test_a_successor_that_comes_too_late_joins_once_its_ranks_have_ended() -> None:
    cluster = supervised()
    for tenth in range(1, 30):
        cluster.tick(tenth / 10)
        for node in ("n1", "n2"):
            cluster.beat(node, tenth / 10)
    assert cluster.monitor.state.nodes["n0"].lost is not None
    late = cluster.beat("n0", 3.0, incarnation="second")
    assert late.events == []
    assert [(clean.node, clean.workers) for clean in late.cleans] == [("n0", ["n0/0"])]
    [joined] = cluster.beat("n0", 3.1, incarnation="second", task=None).events
    assert isinstance(joined, NodeJoined)


def test_a_drain_and_an_isolation_outlast_the_agent() -> None:
    cluster = supervised()
    [draining] = cluster.depart("n0", 0.5, verdict="wait", drain_s=60.0)
    cluster.beat("n0", 1.0, incarnation="second")
    assert cluster.monitor.state.nodes["n0"].draining == draining
    [left] = cluster.depart("n0", 2.0, incarnation="second")
    assert isinstance(left, NodeLeft)


def test_a_successor_is_admitted_without_a_question() -> None:
    cluster = supervised()
    assert ask(cluster, "supervisor of n0") == Answer(verdict="admitted")
    assert not isinstance(ask(cluster, "another"), Answer)  # whether the present agent lives has to be asked
    assert not isinstance(ask(cluster, ""), Answer)


@pytest.mark.parametrize("times", [1, 2])
def test_the_log_alone_tells_a_successor(times: int) -> None:
    """A detector that starts while a node has no agent adopts the successor all the same."""
    cluster = supervised()
    events: list[Event] = []
    state = DetectorState()
    for number in range(times):
        later = {"incarnation": f"later {number}", "probe": f"n0:{number}"}
        events += cluster.beat("n0", 1.0 + number, **later).events
    joined = NodeJoined(
        event_id="joined",
        occurred_at=START,
        node="n0",
        incarnation="first n0",
        agent_pid=1,
        domain="default",
        workers=["n0/0"],
        supervisor="supervisor of n0",
        probe="n0:9",
        network="of n0",
    )
    for event in [joined, *events, *events]:
        evolve(state, event, event.occurred_at)
    node = state.nodes["n0"]
    assert (node.incarnation, node.supervisor) == (f"later {times - 1}", "supervisor of n0")
    assert (node.probe, node.network) == (f"n0:{times - 1}", "of n0")
    assert node.adopted_until == at(float(times)) + timedelta(seconds=RECONNECT_GRACE_S)
