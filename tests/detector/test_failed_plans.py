"""Plans that could not be carried out: the whole events that follow.

The ids are compared, too, as in ``test_whole_events``.
"""

from __future__ import annotations

from typing import Any

from shared.events.codes import FailureCode
from shared.events.plans import TaskChange
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskFailed, TaskSubmitted
from shared.tasks.specification import parse_spec
from tests.agent.kit import SPEC, stage
from tests.detector.kit import START, Cluster, at, lose, moved, only_error, plan, restart_plan
from tests.detector.whole import event_id, failure, incident


def escalated(cluster: Cluster, **rest: Any) -> Any:
    """The one event that follows when a plan fails at second 2.5, and the detector learns of it at second 3."""
    fields = {"occurred_at": at(2.5), "code": FailureCode.INTERNAL, "detail": "internal: it broke", **rest}
    [event] = cluster.monitor.record(moved("p2", 3, "failed", **fields), at(3.0)).events
    return event


def test_a_restart_that_fails() -> None:
    cluster = Cluster()
    cluster.beat("n0", 0.9, step=16)
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    assert escalated(cluster, failed_workers=["n1/0"]) == ErrorDetected(
        event_id=event_id("p2/3/failed", "gpt/transition-failed"),
        occurred_at=at(2.5),
        incident=error.incident,
        kind=ErrorKind.PROCESS_EXIT,
        severity=Severity.SEV1,
        method=Method.TRANSITION,
        detected_at=at(3.0),
        node="n1",
        worker="n1/0",
        task="gpt",
        rank=1,
        generation=3,
        step=16,
        evidence={
            "plan": "p2",
            "detail": "internal: it broke",
            "workers": ["n1/0"],
            "starting": True,
            **failure("transition-failed/process-exit/step 16"),
        },
        escalates=error.event_id,
    )


def test_a_restart_that_fails_on_another_worker_blames_that_worker() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    event = escalated(cluster, failed_workers=["n2/0", "n0/0"])
    assert (event.worker, event.node, event.rank) == ("n2/0", "n2", None)
    assert (event.incident, event.evidence["workers"]) == (error.incident, ["n2/0", "n0/0"])


def test_a_restart_that_fails_on_no_worker_blames_the_one_that_it_was_for() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    event = escalated(cluster)
    assert (event.worker, event.node, event.rank) == ("n1/0", "n1", 1)


def test_an_answer_to_a_lost_node_that_fails_on_no_worker_blames_the_node() -> None:
    cluster = Cluster()
    lost = only_error(lose(cluster, "n1"))
    restart_plan("p2", lost, cluster, "n1/0")
    event = escalated(cluster)
    assert (event.kind, event.severity, event.escalates) == (ErrorKind.NODE_LOST, Severity.SEV1, lost.event_id)
    assert (event.worker, event.node, event.rank) == (None, "n1", None)


def test_a_part_of_another_task_that_fails_on_no_worker_blames_no_worker_of_the_first() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    spec = parse_spec({**SPEC, "name": "other"})
    cluster.fold(TaskSubmitted(event_id="submitted too", occurred_at=START, task="other", spec=spec))
    grows = TaskChange(
        task="other", reason="grow", action="move", from_generation=0, prepare=["n1/0"], target=stage(3, ["n1/0"])
    )
    cluster.fold(plan("p2", error.event_id, grows))
    event = escalated(cluster, task="other")
    assert (event.task, event.worker, event.rank) == ("other", None, None)


def test_a_start_that_fails_on_no_worker() -> None:
    cluster = Cluster(trained=False)
    [event] = cluster.monitor.record(moved("p1", 1, "failed", code="unknown-task", detail="no"), at(3.0)).events
    assert event == incident(
        event_id("p1/1/failed", "gpt/transition-failed"),
        ErrorKind.TRANSITION_FAILED,
        Severity.SEV2,
        Method.TRANSITION,
        (START, at(3.0)),
        task="gpt",
        generation=1,
        step=0,
        evidence={"plan": "p1", "detail": "no", "workers": [], **failure("transition-failed/start/step 0")},
    )


def test_a_start_that_fails_again_and_again_ends_the_task_with_the_detail_as_its_reason() -> None:
    cluster = Cluster(max_restarts=2, trained=False)
    events: list[Any] = []
    for generation in (1, 2, 3):
        name = f"p{generation}"
        failed = moved(name, generation, "failed", failed_workers=["n1/0"], detail="internal: no memory")
        events += cluster.monitor.record(failed, at(generation)).events
        if generation < 3:
            change = TaskChange(
                task="gpt", reason="again", action="move", from_generation=generation,
                prepare=cluster.workers, target=stage(generation + 1, cluster.workers),
            )  # fmt: skip
            cluster.fold(plan(f"p{generation + 1}", events[-1].event_id, change))
    assert [type(e) for e in events] == [ErrorDetected, ErrorDetected, TaskFailed]
    assert [e.evidence["failure"] for e in events[:2]] == ["transition-failed/start/step 0"] * 2
    assert events[2] == TaskFailed(
        event_id=event_id("p3/3/failed", "gpt/transition-failed"),
        occurred_at=at(3.0),
        task="gpt",
        generation=3,
        step=0,
        reason="transition-failed (start) at step 0 happened 3 times; max_restarts is 2: internal: no memory",
        traceback="internal: no memory",
        incident=events[1].incident,
    )
