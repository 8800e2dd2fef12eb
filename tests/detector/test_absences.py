"""Ranks that ended without a signal that says so: the log has a member, and its node has no process for it."""

from __future__ import annotations

from typing import Any

import pytest

from services.detector.incidents.absences import ABSENT_S
from shared.events.plans import TaskChange
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected
from shared.messages.signals import Heartbeat, WorkerStatus
from tests.agent.kit import stage
from tests.detector.kit import Cluster, at, complete, only_error, plan, restart_plan

INTERVAL_S = 0.25


def run(cluster: Cluster, until_s: float, absent: tuple[str, ...] = (), *, since_s: float = 0.0) -> list[Any]:
    """Let heartbeats and ticks come; the workers of nodes in ``absent`` are reported empty. Return the events."""
    events: list[Any] = []
    seconds = since_s
    while seconds < until_s and not events:
        seconds += INTERVAL_S
        for name in cluster.names:
            cluster.beat(name, seconds, task=None if name in absent else "gpt", step=16)
        events = cluster.tick(seconds)
    return events


def test_a_rank_that_vanished_is_found_within_two_seconds() -> None:
    cluster = Cluster()
    assert run(cluster, 1.0) == []
    error = only_error(run(cluster, 9.0, absent=("n2",), since_s=1.0))
    assert (error.kind, error.severity, error.method) == (
        ErrorKind.PROCESS_EXIT,
        Severity.SEV2,
        Method.PROCESS_SUPERVISION,
    )
    assert (error.task, error.worker, error.node, error.rank) == ("gpt", "n2/0", "n2", 2)
    assert (error.generation, error.step) == (1, 16)
    assert error.occurred_at == at(1.0 + INTERVAL_S)
    assert (error.detected_at - at(1.0)).total_seconds() < 2.0
    assert error.evidence["workers"] == ["n2/0"]
    assert error.evidence["exit"] == "vanished"


def test_all_that_vanished_at_once_are_one_incident() -> None:
    cluster = Cluster()
    error = only_error(run(cluster, 9.0, absent=("n1", "n2")))
    assert (error.worker, error.evidence["workers"]) == ("n1/0", ["n1/0", "n2/0"])


def test_a_worker_that_the_agent_does_not_know_or_that_has_another_tasks_process_has_none() -> None:
    cases: list[list[WorkerStatus]] = [[], [WorkerStatus(worker="n1/0", task="other", state="training")]]
    for reported in cases:
        cluster = Cluster(2)
        events: list[Any] = []
        for quarter in range(8):
            seconds = quarter * INTERVAL_S
            cluster.beat("n0", seconds)
            heartbeat = Heartbeat(
                node="n1",
                incarnation="first n1",
                agent_pid=1,
                sequence=100 + quarter,
                sent_at=at(seconds),
                interval_s=INTERVAL_S,
                workers=reported,
            )
            cluster.monitor.feed(heartbeat, at(seconds))
            events += cluster.tick(seconds)
        assert only_error(events).worker == "n1/0"


def test_a_rank_whose_end_is_signalled_is_one_incident_and_no_second() -> None:
    cluster = Cluster()
    run(cluster, 1.0)
    exited = only_error(cluster.signal(cluster.exited("n2/0", 1.1), 1.1))
    assert run(cluster, 4.0, absent=("n2",), since_s=1.1) == []
    restart_plan("p2", exited, cluster, "n2/0")
    assert run(cluster, 6.0, absent=("n2",), since_s=4.0) == []
    complete("p2", cluster, 3)
    assert run(cluster, 9.0, since_s=6.0) == []


def test_a_signal_that_comes_late_is_no_second_incident() -> None:
    cluster = Cluster()
    only_error(run(cluster, 9.0, absent=("n2",)))
    assert cluster.signal(cluster.exited("n2/0", 0.1), 3.0) == []


def test_a_rank_that_its_node_reports_again_has_not_vanished() -> None:
    """One old heartbeat behind the event that a stage has formed proves nothing."""
    cluster = Cluster()
    assert run(cluster, ABSENT_S / 2, absent=("n2",)) == []
    assert run(cluster, 1.0, since_s=ABSENT_S / 2) == []
    assert run(cluster, 1.0 + ABSENT_S / 2, absent=("n2",), since_s=1.0) == []


def test_a_silent_node_proves_no_absence_of_its_ranks() -> None:
    """Its last heartbeat came when the rank had just ended: the signal is on its way, or the node is lost."""
    cluster = Cluster()
    cluster.listen_until(1.0)
    for name in cluster.names:
        cluster.beat(name, 1.0, task=None if name == "n2" else "gpt")
    events: list[Any] = []
    for tenth in range(11, 24):
        for name in ("n0", "n1"):
            cluster.beat(name, tenth / 10)
        events += cluster.tick(tenth / 10)
    assert events == []


def test_signals_that_wait_for_the_bus_come_first() -> None:
    """After the bus was away, agents first send what they have kept: the end of a rank, or of the task."""
    cluster = Cluster()
    run(cluster, 1.0)
    for tenth in range(11, 40):
        cluster.tick(tenth / 10, echo=False)
    cluster.monitor.echo(at(4.0))
    listening = cluster.monitor.state.listening_since
    assert listening > at(4.0)
    seconds = (listening - at(0)).total_seconds()
    assert run(cluster, seconds + ABSENT_S - 2 * INTERVAL_S, absent=("n2",), since_s=4.0) == []
    assert run(cluster, seconds + 3.0, absent=("n2",), since_s=seconds + ABSENT_S - 2 * INTERVAL_S)


def test_after_a_restart_of_the_detector_a_rank_that_vanished_meanwhile_is_found() -> None:
    before = Cluster()
    run(before, 1.0)
    restarted = Cluster()  # folds the same log, and has heard nothing
    assert only_error(run(restarted, 9.0, absent=("n1",))).worker == "n1/0"


@pytest.mark.parametrize("action", ["pause", "stop", "end"])
def test_processes_that_a_plan_ends_have_not_vanished(action: Any) -> None:
    cluster = Cluster()
    change = TaskChange(
        task="gpt",
        reason="asked",
        action=action,
        from_generation=1,
        survivors=cluster.workers,
        release=cluster.workers,
    )
    cluster.fold(plan("p2", "asked", change))
    assert run(cluster, 5.0, absent=tuple(cluster.names)) == []


def test_the_same_absence_found_again_after_a_restart_is_the_same_event() -> None:
    first, second = (only_error(run(Cluster(), 9.0, absent=("n2",))) for _ in range(2))
    assert isinstance(first, ErrorDetected)
    assert first.event_id == second.event_id


def test_a_process_of_an_older_generation_is_not_the_member() -> None:
    cluster = Cluster()
    events: list[Any] = []
    for quarter in range(1, 9):
        seconds = quarter * INTERVAL_S
        for name in cluster.names:
            cluster.beat(name, seconds, generation=0 if name == "n1" else 1)
        events += cluster.tick(seconds)
    assert (only_error(events).worker, only_error(events).evidence["exit"]) == ("n1/0", "vanished")


def test_a_survivor_that_vanished_is_found_while_its_plan_is_carried_out() -> None:
    """Otherwise the plan fails after a while, and its failure is taken for that of the node."""
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n2/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n2/0")
    found = only_error(run(cluster, 9.0, absent=("n1", "n2"), since_s=1.0))
    assert (found.worker, found.kind, found.severity) == ("n1/0", ErrorKind.PROCESS_EXIT, Severity.SEV2)
    assert found.incident != error.incident
    assert found.evidence["workers"] == ["n1/0"], "not n2/0, which the plan starts again"


def test_workers_that_a_plan_gives_up_may_vanish() -> None:
    cluster = Cluster()
    kept = cluster.workers[:2]
    shrink = {"action": "move", "release": ["n2/0"], "target": stage(2, kept)}
    for rest in (shrink, {"action": "stop"}):
        change = TaskChange(task="gpt", reason="x", from_generation=1, survivors=cluster.workers, **rest)
        cluster.fold(plan(f"p{rest['action']}", "cause", change))
        assert run(cluster, 4.0, absent=("n2",)) == []
