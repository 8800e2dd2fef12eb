"""Nodes that leave in order: no error, whatever their ranks and peers do, and back with a new incarnation."""

from __future__ import annotations

from shared.events.plans import Response
from shared.events.union import NodeJoined, NodeLeft
from tests.detector.kit import Cluster, at, moved, plan, restart_plan


def depart_all(cluster: Cluster, seconds: float) -> list[NodeLeft]:
    return [event for name in cluster.names for event in cluster.depart(name, seconds)]


def test_a_node_that_leaves_is_logged_once_and_never_lost() -> None:
    cluster = Cluster()
    cluster.listen_until(10.0)
    for node in cluster.names:
        cluster.beat(node, 10.0)
    (left,) = cluster.depart("n2", 10.1)
    assert isinstance(left, NodeLeft)
    assert (left.node, left.incarnation, left.reason, left.occurred_at) == ("n2", "first n2", "asked to end", at(10.1))
    assert cluster.depart("n2", 10.2) == []
    for tenth in range(102, 130):
        for node in ("n0", "n1"):
            cluster.beat(node, tenth / 10)
        assert cluster.tick(tenth / 10) == []


def test_what_the_ranks_of_a_node_that_leaves_do_is_no_fault() -> None:
    cluster = Cluster()
    (left,) = cluster.depart("n2", 1.0)
    assert cluster.signal(cluster.exited("n2/0", 1.1), 1.1) == []
    assert cluster.signal(cluster.raised("n0/0", 1.1, "communication"), 1.1) == []
    for second in (1.4, 2.4, 3.4):
        for node in ("n0", "n1"):
            cluster.beat(node, second)
        assert cluster.tick(second) == []
    cluster.fold(plan("p2", left.event_id, response=Response.NONE))
    assert cluster.tick(3.5) == []


def test_a_plan_that_fails_because_a_node_left_is_no_failed_response() -> None:
    cluster = Cluster()
    (error,) = cluster.signal(cluster.exited("n1/0", 1.0), 1.0)
    restart_plan("p2", error, cluster, "n1/0")
    cluster.depart("n2", 1.2)
    failed = moved("p2", 3, "failed", code="node-lost", detail="members on n2", failed_workers=["n2/0"])
    assert cluster.fold(failed).events == []


def test_ranks_of_other_nodes_may_still_fail() -> None:
    cluster = Cluster()
    cluster.depart("n2", 1.0)
    (error,) = cluster.signal(cluster.exited("n0/0", 1.1), 1.1)
    assert error.worker == "n0/0"


def test_heartbeats_of_an_agent_that_has_left_mean_nothing() -> None:
    cluster = Cluster()
    depart_all(cluster, 1.0)
    found = cluster.beat("n2", 1.1, task=None)
    assert (found.events, found.cleans) == ([], [])


def test_a_node_that_left_is_back_with_a_new_incarnation_without_an_error() -> None:
    cluster = Cluster()
    depart_all(cluster, 1.0)
    (joined,) = cluster.beat("n2", 5.0, task=None, incarnation="second n2").events
    assert isinstance(joined, NodeJoined)
    assert joined.incarnation == "second n2"


def test_a_node_that_is_lost_or_unknown_leaves_without_an_event() -> None:
    cluster = Cluster()
    assert cluster.depart("n9", 1.0) == []
    assert cluster.depart("n2", 1.0, incarnation="another") == []
    cluster.beat("n2", 2.0, task=None, incarnation="second n2")
    assert cluster.depart("n2", 2.0) == []
