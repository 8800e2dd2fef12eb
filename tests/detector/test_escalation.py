"""Plans that could not be carried out, and responses that failed."""

from __future__ import annotations

import pytest

from services.detector.evolve import evolve
from services.detector.state.cluster import DetectorState
from shared.events.codes import FailureCode
from shared.events.plans import Response, TaskChange
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, TaskStopRefused
from tests.agent.kit import stage
from tests.detector.kit import Cluster, Monitor, at, lose, moved, only_error, plan, restart_plan

SEGFAULT = -11
"""An exit code that may be the machine's doing, and may be a program's."""


def test_a_survivor_that_dies_during_a_plan_is_an_incident_of_its_own() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    second = only_error(cluster.signal(cluster.exited("n2/0", 1.2), 1.2))
    assert second.severity is Severity.SEV2
    assert second.escalates is None
    # The first plan's failure follows from it.
    assert cluster.fold(moved("p2", 2, "failed", failed_workers=["n2/0"])).events == []


@pytest.mark.parametrize("signal_first", [True, False])
def test_a_failed_restart_becomes_sev1_once(signal_first: bool) -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    exited = cluster.exited("n1/0", 2.0, code=SEGFAULT, step=0, generation=2, rank=None)
    output = "Segmentation fault"
    failed = moved("p2", 3, "failed", code="process-exited", failed_workers=["n1/0"], detail=output)
    if signal_first:
        events = cluster.signal(exited, 2.0) + cluster.fold(failed).events
    else:
        events = cluster.fold(failed).events + cluster.signal(exited, 2.0)
    escalated = only_error(events)
    assert (escalated.severity, escalated.escalates, escalated.incident) == (
        Severity.SEV1,
        error.event_id,
        error.incident,
    )
    assert (escalated.node, escalated.worker) == ("n1", "n1/0")


def test_the_first_failure_on_a_node_that_a_lost_one_made_join_is_no_reason_to_give_it_up() -> None:
    cluster = Cluster(4)
    lost = only_error(lose(cluster, "n1"))
    workers = ["n0/0", "n2/0", "n3/0"]
    change = TaskChange(
        task="gpt", reason="replace", action="move", from_generation=1, survivors=workers[:2], hold=True,
        interrupted=stage(2, workers[:2], kind="interrupted"), prepare=["n3/0"], target=stage(3, workers),
    )  # fmt: skip
    cluster.fold(plan("p2", lost.event_id, change, response=Response.RECONFIGURE))
    first = only_error(cluster.signal(cluster.exited("n3/0", 12.0, code=1, generation=2, rank=None), 12.0))
    assert (first.severity, first.escalates, first.incident) == (Severity.SEV2, None, first.event_id)
    # Its restart may fail, too; then it is given up.
    change = change.model_copy(update={"failed": ["n3/0"], "from_generation": 3, "target": stage(5, workers)})
    change = change.model_copy(update={"interrupted": stage(4, workers[:2], kind="interrupted")})
    cluster.fold(plan("p3", first.event_id, change))
    second = only_error(cluster.signal(cluster.exited("n3/0", 13.0, code=SEGFAULT, generation=4, rank=None), 13.0))
    assert (second.severity, second.escalates, second.node) == (Severity.SEV1, first.event_id, "n3")


def test_a_failed_retry_becomes_sev2() -> None:
    cluster = Cluster()
    cluster.monitor.feed(cluster.raised("n0/0", 1.0, "communication"), at(1.0))
    for node in cluster.names:
        cluster.beat(node, 1.5)
    error = only_error(cluster.tick(1.5))
    retry = stage(2, cluster.workers, kind="interrupted")
    change = TaskChange(
        task="gpt", reason="retry", action="move", from_generation=1, survivors=cluster.workers, interrupted=retry
    )
    cluster.fold(plan("p2", error.event_id, change, response=Response.RETRY))
    escalated = only_error(cluster.fold(moved("p2", 2, "failed", detail="again")).events)
    assert (escalated.severity, escalated.incident) == (Severity.SEV2, error.incident)


def test_plans_that_crossed_blame_no_node() -> None:
    cluster = Cluster()
    lost = only_error(lose(cluster, "n1"))
    survivors = ["n0/0", "n2/0"]
    change = TaskChange(
        task="gpt", reason="shrink", action="none", from_generation=1, survivors=survivors, hold=True,
        interrupted=stage(2, survivors, kind="interrupted"),
    )  # fmt: skip
    cluster.fold(plan("p2", lost.event_id, change))
    detail = "released: hold: an earlier plan released n2/0"
    crossed = moved("p2", 2, "failed", code="released", failed_workers=["n2/0"], detail=detail)
    error = only_error(cluster.fold(crossed).events)
    assert (error.kind, error.severity) == (ErrorKind.TRANSITION_FAILED, Severity.SEV2)
    assert (error.worker, error.incident, error.escalates) == ("n2/0", lost.incident, None)


def test_a_start_that_fails_is_an_incident() -> None:
    cluster = Cluster()
    change = TaskChange(
        task="gpt", reason="grow", action="move", from_generation=1, survivors=cluster.workers, prepare=["n3/0"]
    )
    cluster.fold(plan("p2", "n3 joined", change, response=Response.RECONFIGURE))
    error = only_error(cluster.fold(moved("p2", 2, "failed", failed_workers=["n3/0"])).events)
    assert (error.kind, error.severity, error.node) == (ErrorKind.TRANSITION_FAILED, Severity.SEV2, "n3")
    assert error.incident == error.event_id


def test_a_superseded_plan_cannot_fail_any_more() -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    restart_plan("p2", error, cluster, "n1/0")
    second = only_error(cluster.signal(cluster.exited("n2/0", 1.2), 1.2))
    restart_plan("p3", second, cluster, "n2/0", generation=3)
    assert cluster.fold(moved("p2", 2, "failed", failed_workers=["n2/0"])).events == []


def failed_beside_an_error(*, another: bool) -> tuple[Cluster, ErrorDetected]:
    """A pause that has failed while the planner has not answered an error of before, and may be another one since."""
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    pause = TaskChange(
        task="gpt", reason="a drain", action="pause", from_generation=1, survivors=cluster.workers, hold=True
    )
    cluster.fold(plan("p2", "a drain", pause, response=Response.RECONFIGURE))
    assert cluster.fold(moved("p2", 2, "failed", code="released", failed_workers=["n2/0"])).events == []
    if another:
        second = only_error(cluster.signal(cluster.exited("n0/0", 1.2), 1.2))
        assert cluster.fold(plan("p3", error.event_id)).events == []
        error = second
    return cluster, error


@pytest.mark.parametrize("another", [True, False])
def test_a_plan_that_fails_beside_an_error_is_judged_if_the_answer_leaves_the_task_alone(another: bool) -> None:
    cluster, error = failed_beside_an_error(another=another)
    judged = only_error(cluster.fold(plan("p4", error.event_id)).events)
    assert (judged.kind, judged.worker) == (ErrorKind.TRANSITION_FAILED, "n2/0")
    cluster.fold(plan("p5", judged.event_id))
    assert cluster.tick(3.0) == []
    again = DetectorState()
    for event in cluster.monitor.log:
        evolve(again, event, event.occurred_at)
    assert Monitor(at(9.0), again).tick(at(9.0)).events == []


@pytest.mark.parametrize("another", [True, False])
def test_a_plan_that_fails_beside_an_error_whose_answer_changes_the_task_is_superseded(another: bool) -> None:
    cluster, error = failed_beside_an_error(another=another)
    restart_plan("p4", error, cluster, str(error.worker))
    assert cluster.tick(3.0) == []


def test_a_task_that_cannot_be_saved_is_no_error() -> None:
    cluster = Cluster()
    change = TaskChange(task="gpt", reason="asked", action="stop", from_generation=1, survivors=cluster.workers)
    cluster.fold(plan("p2", "asked", change, response=Response.RECONFIGURE))
    detail = "checkpoint-failed: stop: OSError: [Errno 28] No space left on device: '/c'"
    failed = moved("p2", 1, "failed", code=FailureCode.CHECKPOINT_FAILED, detail=detail)
    (refused,) = cluster.fold(failed).events
    assert isinstance(refused, TaskStopRefused)
    assert (refused.plan, refused.reason) == ("p2", "OSError: [Errno 28] No space left on device: '/c'")
    # Its members train on, and are watched like those of any task.
    task = cluster.monitor.state.tasks["gpt"]
    assert (task.change, task.failed_transition, list(task.members)) == (None, None, cluster.workers)
    assert only_error(cluster.signal(cluster.exited("n1/0", 2.0), 2.0)).kind is ErrorKind.PROCESS_EXIT


def test_the_fault_of_a_stopping_rank_comes_before_the_refusal() -> None:
    cluster = Cluster()
    change = TaskChange(task="gpt", reason="asked", action="stop", from_generation=1, survivors=cluster.workers)
    cluster.fold(plan("p2", "asked", change, response=Response.RECONFIGURE))
    only_error(cluster.signal(cluster.exited("n1/0", 1.0), 1.0))
    failed = moved("p2", 1, "failed", code=FailureCode.CHECKPOINT_FAILED, detail="checkpoint-failed: stop: full")
    assert cluster.fold(failed).events == []
