"""A detector that is started again over its log."""

from __future__ import annotations

from services.detector.evolve import evolve
from services.detector.state.cluster import DetectorState
from shared.service.core import Started
from tests.detector.kit import Cluster, at, lose, moved, only_error, restart_plan


def test_a_restarted_monitor_repeats_nothing() -> None:
    cluster = Cluster()
    signal = cluster.exited("n1/0", 1.0)
    error = only_error(cluster.signal(signal, 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    view = cluster.monitor.state
    successor = Cluster()
    successor.monitor.fold(error)
    restart_plan("p2", error, successor, "n1/0")
    assert successor.signal(signal, 5.0) == []
    assert successor.monitor.state.tasks["gpt"].covered == view.tasks["gpt"].covered


def test_an_unanswered_failure_is_escalated_after_a_restart_and_an_answered_one_is_not() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    failed = moved("p2", 3, "failed", failed_workers=["n1/0"])
    cluster.monitor.fold(failed)
    escalated = only_error(cluster.monitor.feed(Started(), at(9.0)).events)
    assert cluster.monitor.feed(Started(), at(9.1)).events == []
    answered = Cluster()
    answered.monitor.fold(error)
    restart_plan("p2", error, answered, "n1/0")
    answered.monitor.fold(failed)
    answered.monitor.fold(escalated)
    assert answered.monitor.feed(Started(), at(9.0)).events == []


def test_events_of_unknown_tasks_and_nodes_fold_without_harm() -> None:
    view = DetectorState()
    cluster = Cluster(1)
    evolve(view, moved("p9", 4, "restored", complete=True), at(0))
    lost = lose(cluster, "n0")
    for event in lost:
        evolve(view, event, at(0))
    assert "gpt" in view.tasks
