"""Nodes that are drained: empty once their tasks have moved, saved after the time for that, and then free to leave."""

from __future__ import annotations

from typing import Any

from shared.events.plans import Response, TaskChange
from shared.events.union import NodeDrained, NodeDraining, NodeLeft, NodeReturned
from tests.agent.kit import stage
from tests.detector.kit import Cluster, at, moved, plan


def draining(**fields: Any) -> NodeDraining:
    known = {"event_id": "draining", "occurred_at": at(1.0), "node": "n2", "by": "user", "timeout_s": 5.0}
    return NodeDraining.model_validate({**known, **fields})


def shrink_plan(cluster: Cluster, cause: str) -> None:
    """The plan by which the task leaves n2 at the next step boundary."""
    staying = cluster.workers[:2]
    change = TaskChange(
        task="gpt",
        reason="n2 is drained",
        action="move",
        from_generation=1,
        survivors=cluster.workers,
        release=["n2/0"],
        target=stage(2, staying),
    )
    cluster.fold(plan("p2", cause, change, response=Response.RECONFIGURE))


def pass_time(cluster: Cluster, start: float, end: float) -> list[Any]:
    """All nodes are heard; return what the monitor finds meanwhile."""
    found = []
    for tenth in range(round(start * 10), round(end * 10) + 1):
        for node in cluster.names:
            cluster.beat(node, tenth / 10, progress_age_s=0.0)
        found += cluster.tick(tenth / 10)
    return found


def test_a_node_is_drained_when_its_tasks_have_moved() -> None:
    cluster = Cluster()
    cluster.fold(draining())
    assert pass_time(cluster, 1.0, 1.5) == []
    shrink_plan(cluster, "draining")
    assert pass_time(cluster, 1.6, 2.0) == []
    cluster.fold(moved("p2", 2, "restored", complete=True))
    (drained,) = cluster.tick(20.1, echo=False)  # also while the bus is away
    assert isinstance(drained, NodeDrained)
    assert (drained.node, drained.occurred_at) == ("n2", at(20.1))
    assert cluster.tick(20.2, echo=False) == []


def test_a_node_without_tasks_is_drained_once_a_plan_has_answered() -> None:
    """Before that, a task may be on its way to the node."""
    cluster = Cluster(3)
    cluster.beat("n9", 1.0, task=None)
    cluster.fold(draining(node="n9"))
    assert cluster.tick(1.1) == []
    cluster.fold(plan("p2", "draining", response=Response.NONE))
    assert [type(e) for e in cluster.tick(1.2)] == [NodeDrained]


def test_what_has_not_moved_in_time_is_to_save() -> None:
    cluster = Cluster()
    cluster.fold(draining())
    shrink_plan(cluster, "draining")
    assert pass_time(cluster, 1.0, 6.0) == []
    (save,) = pass_time(cluster, 6.1, 6.5)
    assert isinstance(save, NodeDraining)
    assert (save.save, save.by, save.timeout_s) == (True, "user", 5.0)
    pause = TaskChange(task="gpt", reason="saves", action="pause", from_generation=1, survivors=cluster.workers)
    cluster.fold(plan("p3", save.event_id, pause, response=Response.RECONFIGURE))
    assert pass_time(cluster, 6.6, 20.0) == []
    cluster.fold(moved("p3", 1, "ended", complete=True))
    assert [type(e) for e in cluster.tick(20.1)] == [NodeDrained]


def test_a_drain_that_was_taken_back_comes_to_no_end() -> None:
    cluster = Cluster()
    cluster.fold(draining())
    shrink_plan(cluster, "draining")
    cluster.fold(NodeReturned(event_id="back", occurred_at=at(2), node="n2", incarnation="first n2"))
    assert pass_time(cluster, 2.0, 10.0) == []


def test_an_agent_leaves_when_its_node_is_drained() -> None:
    cluster = Cluster()
    (began,) = cluster.depart("n2", 1.0, verdict="wait", drain_s=5.0)
    assert isinstance(began, NodeDraining)
    assert (began.by, began.timeout_s, began.save) == ("agent", 5.0, False)
    assert cluster.depart("n2", 1.2, verdict="wait", drain_s=5.0) == []
    shrink_plan(cluster, began.event_id)
    cluster.fold(moved("p2", 2, "restored", complete=True))
    assert [type(e) for e in cluster.tick(2.0)] == [NodeDrained]
    assert [type(e) for e in cluster.depart("n2", 2.1, drain_s=5.0)] == [NodeLeft]
    assert cluster.depart("n2", 2.2) == []


def test_an_agent_that_may_wait_no_longer_leaves_at_once() -> None:
    cluster = Cluster()
    cluster.depart("n2", 1.0, verdict="wait", drain_s=5.0)
    assert [type(e) for e in cluster.depart("n2", 1.1)] == [NodeLeft]


def test_an_agent_asks_again_after_a_user_has_returned_its_node() -> None:
    cluster = Cluster()
    (first,) = cluster.depart("n2", 1.0, verdict="wait", drain_s=5.0)
    cluster.fold(NodeReturned(event_id="back", occurred_at=at(2), node="n2", incarnation="first n2"))
    (second,) = cluster.depart("n2", 3.0, verdict="wait", drain_s=5.0)
    assert second.event_id != first.event_id
