"""Escalation by cause, whatever the step and although each response succeeded; bugs of tasks; injected faults."""

from __future__ import annotations

from typing import Any

from services.detector.decisions.decision import DetectorLimits
from services.detector.incidents import causes
from services.detector.state.cluster import DetectorState
from services.detector.state.unlogged import Condemnation
from shared.events.evidence import Evidence
from shared.events.plans import TaskChange
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, FaultInjected, NodeReturned, StateMoved, TaskFailed
from shared.settings.escalation import EscalationLimits
from tests.agent.kit import stage
from tests.detector.kit import LIMITS, START, Cluster, at, complete, moved, plan, restart_plan

SEGFAULT = -11


def cluster(nodes: int = 8, **limits: Any) -> Cluster:
    found = Cluster(nodes)
    fields = {name: getattr(LIMITS, name) for name in LIMITS.__slots__}
    found.monitor.limits = DetectorLimits(**{**fields, "escalation": EscalationLimits(**limits)})
    return found


def fail(found: Cluster, worker: str, seconds: float, *, step: int, code: int = SEGFAULT) -> Any:
    """A rank ends, and is restarted or given up with success."""
    events = found.signal(found.exited(worker, seconds, code=code, step=step), seconds)
    event = events[-1]
    if isinstance(event, ErrorDetected):
        name = f"plan after {seconds}"
        if event.severity is Severity.SEV1:
            rest = [w for w in found.workers if w != worker]
            change = TaskChange(
                task="gpt", reason="without it", action="move", from_generation=found.generation, survivors=rest,
                failed=[worker], hold=True, interrupted=stage(found.generation + 1, rest, kind="interrupted"),
            )  # fmt: skip
            found.fold(plan(name, event.event_id, change))
            found.fold(moved(name, found.generation + 1, "resumed", step=step, complete=True))
            found.generation, found.workers = found.generation + 1, rest
        else:
            restart_plan(name, event, found, worker, generation=found.generation)
            complete(name, found, found.generation + 2, step=step)
    return event


def severities(events: list[Any]) -> list[str]:
    return [event.severity.value for event in events]


def test_a_cause_that_comes_again_on_one_worker_isolates_its_node_although_each_restart_succeeded() -> None:
    found = cluster()
    events = [fail(found, "n1/0", 100.0 * i, step=10 * i) for i in range(1, 4)]
    assert severities(events) == ["SEV2", "SEV2", "SEV1"]
    last = events[-1]
    assert (last.node, last.escalates, last.incident) == ("n1", None, last.event_id)
    assert Evidence.read(last.evidence).rule == "worker"
    assert last.evidence["repetition"] == {
        "cause": "process-exit/segfault",
        "times": 3,
        "limit": 3,
        "window_s": 3600.0,
        "first_at": at(100.0).isoformat(),
        "place": "n1/0",
    }
    assert found.monitor.state.condemned == {"n1": Condemnation(last.event_id, by_device=False)}


def test_what_is_older_than_the_window_and_another_cause_do_not_count() -> None:
    found = cluster(cause_window_s=250.0)
    events = [fail(found, "n1/0", 200.0 * i, step=10 * i) for i in range(1, 5)]
    events += [fail(found, "n2/0", 900.0 + i, step=50 + i, code=code) for i, code in enumerate((-6, -7, -4))]
    assert set(severities(events)) == {"SEV2"}


def test_the_limit_can_be_set_and_switched_off() -> None:
    assert severities([fail(cluster(cause_worker_limit=1), "n1/0", 1.0, step=1)]) == ["SEV1"]
    found = cluster(cause_worker_limit=0, cause_node_limit=0, lemon_false_positives=0.0)
    assert set(severities([fail(found, "n1/0", 10.0 * i, step=i) for i in range(1, 8)])) == {"SEV2"}


def test_a_retried_cause_becomes_sev2_and_then_sev1() -> None:
    found = cluster()
    state, limits = found.monitor.state, EscalationLimits(cause_worker_limit=2, cause_node_limit=0)
    seen = []
    for number in range(1, 5):
        event = ErrorDetected(
            event_id=f"e{number}", incident=f"e{number}", occurred_at=at(number), detected_at=at(number),
            kind=ErrorKind.EXCEPTION, severity=Severity.SEV3, method=Method.EXCEPTION, node="n1", worker="n1/0",
            task="gpt", step=number, evidence={"failure": f"exception/OSError/step {number}", "class": "network"},
        )  # fmt: skip
        escalated = causes.escalate(state, event, limits)
        assert isinstance(escalated, ErrorDetected)
        seen.append(escalated.severity.value)
        found.fold(escalated)
    assert seen == ["SEV3", "SEV2", "SEV2", "SEV1"]


def test_broken_collectives_that_one_worker_reports_first_isolate_no_node() -> None:
    state = DetectorState()
    for number in range(9):
        event = ErrorDetected(
            event_id=f"e{number}", incident=f"e{number}", occurred_at=at(number), detected_at=at(number),
            kind=ErrorKind.CONNECTION, severity=Severity.SEV3, method=Method.EXCEPTION, node="n1", worker="n1/0",
            task="gpt", step=number, evidence={"failure": f"connection/CommunicationFailed/step {number}"},
        )  # fmt: skip
        escalated = causes.escalate(state, event, EscalationLimits())
        assert isinstance(escalated, ErrorDetected)
        assert escalated.severity is (Severity.SEV2 if number >= 2 else Severity.SEV3)
        state.causes.add(escalated, Evidence.read(escalated.evidence))


def test_a_cause_on_several_workers_of_a_node_isolates_it() -> None:
    found = cluster()
    state = found.monitor.state
    escalated: Any = None
    for number in range(5):
        event = ErrorDetected(
            event_id=f"e{number}", incident=f"e{number}", occurred_at=at(number), detected_at=at(number),
            kind=ErrorKind.EXCEPTION, severity=Severity.SEV2, method=Method.EXCEPTION, node="n1",
            worker=f"n1/{number}", task="gpt", step=number,
            evidence={"failure": f"exception/OSError/step {number}", "class": "storage"},
        )  # fmt: skip
        escalated = causes.escalate(state, event, EscalationLimits(lemon_false_positives=0.0))
        found.fold(escalated)
    assert (escalated.severity, escalated.evidence["rule"]) == (Severity.SEV1, "node")
    assert escalated.evidence["repetition"]["place"] == "n1"


def test_a_cause_that_follows_the_task_isolates_no_node_and_ends_the_task_in_the_end() -> None:
    found = cluster(cause_task_limit=8)
    events: list[Any] = []
    for number in range(9):
        events.append(fail(found, f"n{number % 3}/0", 10.0 * number, step=number, code=1))
    assert set(severities(events[:-1])) == {"SEV2"}
    failed = events[-1]
    assert isinstance(failed, TaskFailed)
    assert failed.reason == (
        "process-exit/exit 1 happened at 9 different steps on 3 nodes within 3600 s; cause_task_limit is 8: the end"
    )
    assert events[6].evidence["repetition"]["not_isolated"] == "the cause follows the task"
    assert found.monitor.state.condemned == {}


def test_processes_that_somebody_kills_do_not_end_the_task() -> None:
    found = cluster(cause_task_limit=2)
    events = [fail(found, f"n{i % 3}/0", 10.0 * i, step=i, code=-9) for i in range(12)]
    assert {type(event) for event in events} == {ErrorDetected}


def test_the_same_failure_at_the_same_step_counts_once() -> None:
    found = cluster()
    events = [fail(found, "n1/0", 100.0 * i, step=16) for i in range(1, 4)]
    assert severities(events) == ["SEV2", "SEV2", "SEV2"]


def test_a_small_cluster_and_the_last_of_a_kind_keep_their_nodes() -> None:
    found = cluster(3)
    events = [fail(found, "n1/0", 100.0 * i, step=10 * i) for i in range(1, 5)]
    assert set(severities(events)) == {"SEV2"}
    assert events[-1].evidence["repetition"]["not_isolated"] == (
        "0 of 3 nodes are isolated, and isolated_fraction allows 0"
    )
    found = cluster(8)
    found.monitor.state.nodes["n1"].hardware = "h100"
    events = [fail(found, "n1/0", 100.0 * i, step=10 * i) for i in range(1, 5)]
    assert set(severities(events)) == {"SEV2"}
    assert events[-1].evidence["repetition"]["not_isolated"] == "it is the last node of kind h100"


def test_at_most_a_fraction_of_the_cluster_is_isolated() -> None:
    found = cluster(8, cause_worker_limit=1, lemon_false_positives=0.0)
    codes = [-11, -7, -6, -4]  # different causes: none follows the task
    events = [fail(found, f"n{i}/0", 10.0 * i, step=i, code=code) for i, code in enumerate(codes, 1)]
    assert severities(events) == ["SEV1", "SEV1", "SEV2", "SEV2"]
    assert "2 of 8 nodes are isolated" in events[-1].evidence["repetition"]["not_isolated"]


def test_injected_faults_count_nowhere() -> None:
    found = cluster()
    for number in range(1, 6):
        found.fold(
            FaultInjected(event_id=f"f{number}", occurred_at=at(100.0 * number), fault="kill", task="gpt", rank=1)
        )
        assert fail(found, "n1/0", 100.0 * number + 1.0, step=number).severity is Severity.SEV2
    assert found.monitor.state.causes.nodes == {}
    assert found.monitor.state.causes.drills == []


def test_a_node_that_an_operator_returns_begins_anew() -> None:
    found = cluster()
    for i in range(1, 4):
        fail(found, "n1/0", 100.0 * i, step=10 * i)
    returned = NodeReturned(event_id="r", occurred_at=START, node="n1", incarnation="first n1")
    found.fold(returned)
    state = found.monitor.state
    assert (state.condemned, "n1" in state.causes.nodes) == ({}, False)


def test_a_state_moved_event_is_no_error() -> None:
    event = moved("p1", 1, "restored")
    assert isinstance(event, StateMoved)
    assert causes.escalate(DetectorState(), event, EscalationLimits()) is event
