"""Nodes that join, fall silent and come back."""

from __future__ import annotations

from services.agent.node.slots import Node
from services.detector.nodes.leftovers import Clean
from shared.events.plans import TaskChange
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, NodeJoined
from tests.agent.kit import stage
from tests.detector.kit import Cluster, at, lose, only_error, plan


def test_a_node_joins_with_its_first_heartbeat_and_not_again() -> None:
    cluster = Cluster(1)
    assert cluster.beat("n0", 1.0).events == []
    joined = cluster.beat("n1", 1.0, task=None).events
    assert [type(e) for e in joined] == [NodeJoined]
    assert joined[0].node == "n1"
    assert joined[0].workers == ["n1/0"]
    assert cluster.beat("n1", 1.2, task=None).events == []


def test_a_silent_node_is_lost_with_all_its_tasks() -> None:
    cluster = Cluster()
    cluster.listen_until(10.0)
    for node in ("n0", "n1", "n2"):
        cluster.beat(node, 10.0)
    for node in ("n0", "n1"):
        cluster.beat(node, 11.4)
    for tenth in range(1, 15):
        assert cluster.tick(10.0 + tenth / 10) == []
    error = only_error(cluster.tick(11.6))
    assert (error.kind, error.severity, error.method) == (ErrorKind.NODE_LOST, Severity.SEV1, Method.NODE_HEALTH)
    assert (error.node, error.task, error.worker) == ("n2", None, None)
    assert error.occurred_at == at(10.0)
    assert error.detected_at == at(11.6)
    assert error.evidence["tasks"]["gpt"]["workers"] == ["n2/0"]
    assert cluster.tick(11.7) == []


def test_the_end_of_ranks_on_a_lost_node_is_no_incident_of_its_own() -> None:
    cluster = Cluster()
    lost = only_error(lose(cluster, "n2"))
    assert cluster.signal(cluster.exited("n2/0", 12.0), 12.0) == []
    # The survivors' broken sockets are explained by it.
    assert cluster.signal(cluster.raised("n0/0", 12.0, "communication"), 12.0) == []
    for node in ("n0", "n1"):
        cluster.beat(node, 12.3)
        cluster.beat(node, 13.0)
    assert cluster.tick(13.0) == []
    assert lost.evidence["incarnation"] == "first n2"


def test_a_node_that_comes_back_is_cleaned_before_it_joins() -> None:
    cluster = Cluster()
    lose(cluster, "n2")
    back = cluster.beat("n2", 20.0)
    assert back.events == []
    assert back.cleans == [Clean(node="n2", task="gpt", generation=1, workers=["n2/0"])]
    assert cluster.beat("n2", 20.2).cleans == []  # not with every heartbeat
    assert [type(e) for e in cluster.beat("n2", 20.4, task=None).events] == [NodeJoined]
    assert cluster.beat("n2", 20.6, task=None).events == []


def test_a_node_that_a_paused_plan_had_reached_is_cleaned_with_a_generation_it_accepts() -> None:
    cluster = Cluster()
    growing = TaskChange(
        task="gpt",
        reason="grows",
        action="move",
        from_generation=1,
        survivors=cluster.workers[:2],
        prepare=["n2/0"],
        target=stage(2, cluster.workers),
    )
    cluster.fold(plan("p2", "e", growing))
    # Its agent was asked to prepare for generation 2; the plan for its loss leads to no generation.
    agent = Node.create("n2", "first n2", 1)
    assert agent.admit("gpt", 2, "p2")
    lost = only_error(lose(cluster, "n2"))
    pausing = TaskChange(task="gpt", reason="too few", action="pause", from_generation=1, survivors=cluster.workers[:2])
    cluster.fold(plan("p3", lost.event_id, pausing))
    [clean] = cluster.beat("n2", 20.0, state="ready", generation=2).cleans
    assert clean == Clean(node="n2", task="gpt", generation=2, workers=["n2/0"])
    assert agent.admit(clean.task, clean.generation, "clean/n2")


def test_a_new_incarnation_means_that_the_old_one_is_lost() -> None:
    cluster = Cluster()
    cluster.beat("n2", 5.0)
    events = cluster.beat("n2", 5.3, task=None, incarnation="second").events
    assert [type(e) for e in events] == [ErrorDetected, NodeJoined]
    assert events[0].kind is ErrorKind.NODE_LOST
    assert events[0].evidence["incarnation"] == "first n2"
    assert events[1].incarnation == "second"
    # A late heartbeat of the old one changes nothing.
    assert cluster.beat("n2", 5.1).events == []
    assert cluster.monitor.state.nodes["n2"].incarnation == "second"


def test_a_monitor_that_does_not_receive_its_own_message_blames_no_node() -> None:
    cluster = Cluster()
    for node in ("n0", "n1", "n2"):
        cluster.beat(node, 1.0)
    for tenth in range(10, 80):
        assert cluster.tick(tenth / 10, echo=False) == []
    # The bus is back: clients get time to reconnect.
    for tenth in range(80, 110):
        assert cluster.tick(tenth / 10) == []
    events = [event for tenth in range(110, 140) for event in cluster.tick(tenth / 10)]
    assert {e.node for e in events if isinstance(e, ErrorDetected)} == {"n0", "n1", "n2"}


def test_the_loss_of_an_older_incarnation_is_no_loss_of_the_newer_one() -> None:
    """The log may have the loss after the join: an agent that is started again is noticed at once."""
    cluster = Cluster()
    [lost, joined] = cluster.beat("n2", 5.3, task=None, incarnation="second").events
    successor = Cluster()
    successor.fold(joined, lost)
    assert successor.monitor.state.nodes["n2"].lost is None


def test_a_clock_that_goes_forward_by_an_hour_is_no_silence() -> None:
    """The monitor follows the log's time (``shared.clock``); its nodes and ranks have done nothing wrong."""
    cluster, jump_s = Cluster(), 3600.0
    for quarter in range(1, 20):
        for name in cluster.names:
            cluster.beat(name, quarter / 4, step=quarter)
        assert cluster.tick(quarter / 4) == []
    assert cluster.tick(5.0 + jump_s, echo=False) == []
    for quarter in range(21, 60):
        assert cluster.tick(quarter / 4 + jump_s) == []
        for name in cluster.names:
            cluster.beat(name, quarter / 4 + jump_s, step=quarter)
        assert cluster.tick(quarter / 4 + jump_s) == []
    error = only_error(cluster.signal(cluster.exited("n1/0", 15.0 + jump_s), 15.0 + jump_s))
    assert error.kind is ErrorKind.PROCESS_EXIT
