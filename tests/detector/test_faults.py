"""Processes that end, exceptions and broken collectives."""

from __future__ import annotations

import itertools

import pytest

from services.api.postmortem.evidence import statements
from services.detector.decisions.incidents import MOST_RANKS
from shared.events.plans import Response, TaskChange
from shared.events.severities import ErrorKind, Method, Severity
from shared.messages.signals import Signal
from tests.detector.kit import Cluster, at, complete, only_error, plan, restart_plan


def test_a_killed_rank_is_an_incident_with_the_evidence_a_reader_needs() -> None:
    cluster = Cluster()
    for node in cluster.names:
        cluster.beat(node, 1.0, step=16, micro_batch=3)
    signal = cluster.exited("n1/0", 1.1)
    error = only_error(cluster.signal(signal, 1.11))
    assert (error.kind, error.severity, error.method) == (
        ErrorKind.PROCESS_EXIT,
        Severity.SEV2,
        Method.PROCESS_SUPERVISION,
    )
    assert (error.task, error.worker, error.node, error.rank) == ("gpt", "n1/0", "n1", 1)
    assert (error.generation, error.step, error.incident) == (1, 16, error.event_id)
    assert (error.occurred_at, error.detected_at) == (at(1.1), at(1.11))
    assert error.evidence["exit"] == "SIGKILL"
    assert error.evidence["last_output"] == "the end"
    assert error.evidence["ranks"]["n0/0"]["micro_batch"] == 3
    # The same signal again has no effect.
    assert cluster.signal(signal, 1.2) == []


def test_of_a_large_task_the_evidence_has_those_to_blame_and_those_that_differ() -> None:
    cluster = Cluster(300)
    for node in cluster.names:
        cluster.beat(node, 1.0, step=16, micro_batch=5 if node == "n299" else 3)
    error = only_error(cluster.signal(cluster.exited("n200/0", 1.1), 1.11))
    assert list(error.evidence["ranks"])[:2] == ["n200/0", "n299/0"]
    assert len(error.evidence["ranks"]) == MOST_RANKS
    assert error.evidence["ranks_left_out"] == 300 - MOST_RANKS
    most = error.evidence["most_ranks"]
    assert (most["count"], most["step"], most["micro_batch"]) == (299, 16, 3)
    assert f"{300 - MOST_RANKS} ranks are not listed; 299 of all were in phase compute of step 16." in statements(
        error.evidence
    )


@pytest.mark.parametrize("order", list(itertools.permutations(["exception", "exit", "peer 0", "peer 2"])))
def test_one_failure_is_one_incident_in_whatever_order_its_signals_come(order: tuple[str, ...]) -> None:
    cluster = Cluster()
    signals: dict[str, Signal] = {
        "exception": cluster.raised("n1/0", 1.0, "exception"),
        "exit": cluster.exited("n1/0", 1.05, code=1),
        "peer 0": cluster.raised("n0/0", 1.01, "communication"),
        "peer 2": cluster.raised("n2/0", 1.02, "communication"),
    }
    events = [e for name in order for e in cluster.signal(signals[name], 1.1)]
    for node in cluster.names:
        cluster.beat(node, 2.0)
    events += cluster.tick(2.1)
    error = only_error(events)
    assert error.worker == "n1/0"
    first = min(["exception", "exit"], key=order.index)
    assert error.kind is (ErrorKind.EXCEPTION if first == "exception" else ErrorKind.PROCESS_EXIT)


def test_two_killed_ranks_are_two_incidents() -> None:
    cluster = Cluster()
    events = []
    for worker in ("n0/0", "n1/0"):
        events += cluster.signal(cluster.exited(worker, 1.0), 1.0)
    assert [e.worker for e in events] == ["n0/0", "n1/0"]
    assert events[0].incident != events[1].incident


def test_non_finite_numbers_are_one_incident_for_each_process_that_they_end() -> None:
    cluster = Cluster()
    events = []
    for worker in cluster.workers[:2]:
        events += cluster.signal(cluster.raised(worker, 1.0, "non_finite"), 1.0)
        events += cluster.signal(cluster.exited(worker, 1.1, code=1), 1.1)
    assert [e.worker for e in events] == cluster.workers[:2]
    error = events[0]
    assert (error.kind, error.severity, error.method) == (ErrorKind.NON_FINITE, Severity.SEV2, Method.STATISTICS)


def test_broken_sockets_without_a_cause_are_a_connection_fault_once_all_nodes_have_reported() -> None:
    cluster = Cluster()
    cluster.monitor.feed(cluster.raised("n0/0", 1.0, "communication"), at(1.0))
    cluster.beat("n0", 1.3)
    cluster.beat("n1", 1.3)
    assert cluster.tick(1.35) == []
    cluster.beat("n2", 1.4)
    error = only_error(cluster.tick(1.45))
    assert (error.kind, error.severity, error.worker) == (ErrorKind.CONNECTION, Severity.SEV3, "n0/0")
    assert cluster.tick(1.5) == []


@pytest.mark.parametrize("action", ["stop", "pause"])
def test_sockets_that_break_while_a_task_saves_its_state_are_found_as_soon_as_otherwise(action: str) -> None:
    cluster = Cluster()
    leaves = TaskChange.model_validate(
        {"task": "gpt", "reason": "asked", "action": action, "from_generation": 1, "survivors": cluster.workers}
    )
    cluster.fold(plan("p2", "asked", leaves, response=Response.RECONFIGURE))
    for worker in cluster.workers:
        cluster.monitor.feed(cluster.raised(worker, 1.0, "communication"), at(1.0))
    for node in cluster.names:
        cluster.beat(node, 1.4, phase="waiting")
    error = only_error(cluster.tick(1.45))
    assert (error.kind, error.severity, error.worker) == (ErrorKind.CONNECTION, Severity.SEV3, "n0/0")


@pytest.mark.parametrize("away_s", [1.0, 4.0])
def test_a_bus_that_was_away_does_not_make_a_node_report(away_s: float) -> None:
    """The outage excuses its silence, and proves nothing about its ranks, which may have died with it."""
    cluster = Cluster()
    cluster.listen_until(1.0)
    for node in cluster.names:
        cluster.beat(node, 0.9)
    cluster.monitor.feed(cluster.raised("n0/0", 1.0, "communication"), at(1.0))
    back_s = 1.0 + away_s
    for node in ("n0", "n1"):
        cluster.beat(node, back_s)
    assert cluster.tick(back_s) == []
    assert cluster.tick(back_s + 0.1) == []
    assert cluster.monitor.state.nodes["n2"].lost is None


def test_a_dead_rank_in_a_heartbeat_leaves_the_suspicion_to_its_exit() -> None:
    cluster = Cluster()
    cluster.monitor.feed(cluster.raised("n0/0", 1.0, "communication"), at(1.0))
    for node in ("n0", "n2"):
        cluster.beat(node, 1.4)
    cluster.beat("n1", 1.4, task=None)
    assert cluster.tick(1.45) == []
    error = only_error(cluster.signal(cluster.exited("n1/0", 0.99), 1.5))
    assert error.evidence["broken_sockets_of"] == ["n0/0"]


def test_signals_of_older_generations_and_unknown_tasks_are_dropped() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    complete("p2", cluster, 3)
    old = cluster.exited("n0/0", 2.0, generation=1)
    assert cluster.signal(old, 2.0) == []
    unknown = cluster.exited("n0/0", 2.0, task="other")
    assert cluster.signal(unknown, 2.0) == []
    only_error(cluster.signal(cluster.exited("n0/0", 2.0), 2.0))
