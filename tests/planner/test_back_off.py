"""The same failure again: its answer waits; in the end the task waits for its operator, and others get its workers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from services.planner.replay.log_fold import Fold
from services.planner.state.admission import due
from services.planner.state.cluster import node_of
from shared.events.plans import Response, Trigger
from shared.events.severities import ErrorKind, Severity
from shared.events.union import ErrorDetected, PlanDecided, TaskResumeRequested
from tests.planner.kit import World, change_of, running, workers

REASON = "it has failed 25 times without a new step, for 14400 s; progress_timeout_s is 14400"


def fail(
    world: World, worker: str, name: str = "a", severity: Severity = Severity.SEV2, **evidence: Any
) -> PlanDecided:
    return world.error(
        ErrorKind.EXCEPTION, worker=worker, node=node_of(worker), task=name, severity=severity, evidence=evidence
    )


def resume(world: World, name: str = "a") -> PlanDecided:
    return world.must(TaskResumeRequested(**world.base(), task=name))


def test_a_first_failure_is_answered_without_a_wait() -> None:
    world = running()
    plan = fail(world, world.task().members[-1])
    assert change_of(plan).not_before is None
    assert "not_before" not in plan.canonical()


def test_the_wait_of_an_error_is_that_of_its_plan() -> None:
    world = running()
    plan = fail(world, world.task().members[-1], wait_s=8.0, without_progress=5)
    error = world.records[-2].event
    assert isinstance(error, ErrorDetected)
    change = change_of(plan)
    assert change.not_before == error.detected_at + timedelta(seconds=8)
    assert change.reason.endswith(
        "restarted on its node after 8 s, since the same failure came 5 times without a new step"
    )
    assert change.interrupted is not None  # the others go on meanwhile


def test_a_retry_in_place_waits_too() -> None:
    world = running()
    member = world.task().members[0]
    plan = fail(world, member, severity=Severity.SEV3, wait_s=8.0, without_progress=5)
    error = world.records[-2].event
    assert isinstance(error, ErrorDetected)
    change = change_of(plan)
    assert (plan.response, change.prepare, change.failed) == (Response.RETRY, [], [])
    assert change.not_before == error.detected_at + timedelta(seconds=8)
    assert change.reason.endswith("retried in place after 8 s, since the same failure came 5 times without a new step")
    assert change_of(fail(world, member, severity=Severity.SEV3)).not_before is None


def test_an_escalation_that_names_no_node_waits_too() -> None:
    """What was retried and restarted in vain is started anew, later each time; no other task is kept waiting."""
    world = running(nodes=4, workers=1)
    world.submit("b")
    about: dict[str, Any] = {"task": "a", "severity": Severity.SEV1, "escalates": "before"}
    plan = world.error(ErrorKind.CONNECTION, evidence={"wait_s": 4.0, "without_progress": 4}, **about)
    error = world.records[-2].event
    assert isinstance(error, ErrorDetected)
    change = change_of(plan)
    assert change.prepare
    assert change.not_before == error.detected_at + timedelta(seconds=4)
    assert change.reason.endswith("after 4 s, since the same failure came 4 times without a new step")
    assert {one.not_before for one in plan.changes if one.task != "a"} <= {None}
    assert change_of(world.error(ErrorKind.CONNECTION, **about)).not_before is None


def test_a_task_is_moved_off_an_isolated_node_at_once() -> None:
    world = running()
    member = world.task().members[-1]
    assert change_of(fail(world, member, severity=Severity.SEV1, wait_s=4.0, without_progress=4)).not_before is None


def test_the_wait_is_of_one_plan() -> None:
    """What else happens is answered at once."""
    world = running()
    *others, lost = world.task().members
    fail(world, lost, wait_s=8.0, without_progress=5)
    assert change_of(fail(world, others[-1])).not_before is None


@pytest.mark.parametrize("wait_s", ["soon", -1.0, 1e300, None, [3.0]])
def test_a_wait_that_is_none_is_not_used(wait_s: object) -> None:
    world = running()
    assert change_of(fail(world, world.task().members[-1], wait_s=wait_s)).not_before is None


def given_up(world: World, name: str = "a") -> PlanDecided:
    """All processes of a task fail, the last of them once too often."""
    members = world.task(name).members
    for worker in members[:-1]:
        world.exit(worker)
    return fail(world, members[-1], name, wait_s=120.0, without_progress=25, needs_operator=REASON)


def test_a_task_that_is_given_up_has_no_workers_and_says_why() -> None:
    world = running()
    plan = given_up(world)
    change = change_of(plan)
    assert (change.action, change.prepare, plan.response) == ("pause", [], Response.RECONFIGURE)
    paused = world.complete(plan)
    assert isinstance(paused, PlanDecided)
    assert paused.queued["a"].startswith("waits for its operator: exception: ")
    assert paused.queued["a"].endswith("`unicron resume a` tries it again")
    assert world.task().members == ()


def test_others_get_the_workers_and_nothing_but_the_operator_brings_it_back() -> None:
    world = running(nodes=2, workers=1)
    world.submit("b", workers={"min": 1, "max": 1})
    world.complete(given_up(world))
    assert world.join("n9").queued["a"].startswith("waits for its operator")
    plan = resume(world)
    assert plan.trigger is Trigger.RESUME_REQUESTED
    assert workers(change_of(plan).target)
    assert not world.task().needs_operator


def test_a_resumption_of_a_task_that_has_workers_is_answered_by_nothing() -> None:
    world = running()
    fail(world, world.task().members[-1], wait_s=8.0, without_progress=5)
    assert resume(world).changes == []
    assert resume(world, "unknown").changes == []


def test_a_task_that_is_given_up_can_be_stopped() -> None:
    world = running()
    world.complete(given_up(world))
    world.stop()
    assert world.task().life == "ended"


def test_a_submission_begins_anew() -> None:
    world = running()
    world.complete(given_up(world))
    world.stop()
    assert workers(change_of(world.submit(saved="stop-checkpoint", step=5)).target)


def test_an_isolated_node_does_not_keep_the_task_from_its_operator() -> None:
    world = running(nodes=1, workers=1)
    [worker] = world.task().members
    world.join("n9")
    plan = fail(world, worker, severity=Severity.SEV1, needs_operator=REASON)
    assert change_of(plan).action == "pause"


def test_the_log_is_decided_again_in_the_same_way() -> None:
    world = running()
    plan = fail(world, world.task().members[-1], wait_s=8.0, without_progress=5)
    world.complete(plan)
    paused = given_up(world)
    resume(world)
    fold = Fold()
    decided = []
    for record in world.records:
        if fold.take(record):
            answer = fold.decide(record)
            fold.answer(record, answer)
            decided += [one.canonical() for one in answer if isinstance(one, PlanDecided)]
    assert decided == [r.event.canonical() for r in world.records if isinstance(r.event, PlanDecided)]
    assert paused.canonical() in decided


def test_a_wait_is_no_measured_transition() -> None:
    world = running()
    before = world.state.transitions
    world.wait(60.0)
    world.complete(fail(world, world.task().members[-1], wait_s=60.0, without_progress=8))
    assert world.state.transitions == before
    world.complete(fail(world, world.task().members[-1]))
    assert world.state.transitions != before


def test_a_task_that_waits_for_its_operator_does_not_starve() -> None:
    world = World(starvation_s=30.0)
    world.join("n0", workers=1)
    world.complete(world.submit())
    world.complete(given_up(world))
    assert world.task().queued
    assert due(world.state) == []
    world.submit("b")
    world.complete(resume(world))
    assert [one.task for one in due(world.state)] == ["a"]  # now it waits for the worker that the other one has
