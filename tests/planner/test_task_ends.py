"""What is left of a task that ended, was paused, or whose name is used again, and what events behind its end do."""

from __future__ import annotations

from typing import Any

import pytest

from services.planner.decide import SERVICE, asked
from services.planner.evolve import evolve
from shared.events.plans import Response, Trigger
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import (
    ErrorDetected,
    TaskCheckpointed,
    TaskFailed,
    TaskFinished,
    TaskProgressed,
    TaskStopped,
    TaskStopRequested,
    TaskSubmitted,
    derived_id,
)
from tests.planner.kit import World, change_of, running, workers

CLEARED = {"members": (), "owners": (), "lost": (), "broken": False, "queued": ""}
"""What an ended task has no more."""


def cleared(world: World, name: str = "a") -> dict[str, object]:
    task = world.task(name)
    return {field: getattr(task, field) for field in CLEARED}


def broken_and_stopping() -> World:
    """Return a world whose task lost a worker while it stopped, so that each cleared field has a value before."""
    world = running()
    world.checkpoint(step=4)
    world.stop()
    lost = world.task().owners[1]
    world.exit(lost)
    world.exit(world.task().owners[0])
    return world


@pytest.mark.parametrize("event", [TaskFinished, TaskFailed, TaskStopped], ids=lambda event: event.__name__)
def test_an_end_clears_the_task_before_any_plan_answers_it(event: Any) -> None:
    """The plan that answers the end divides the cluster by this state."""
    world = running()
    world.stop()
    state = world.state.with_changed("a", lost=("n0/0",), broken=True, queued="a reason")
    fields = {"path": "", "samples_sha256": "", "parameters_path": "", "reason": "bug", "incident": ""}
    known = {name: value for name, value in fields.items() if name in event.model_fields}
    ended = event(event_id="end", occurred_at=world.now, task="a", generation=1, step=8, **known)
    task = evolve(state, ended, world.now).find("a")
    assert task is not None
    assert {field: getattr(task, field) for field in CLEARED} == CLEARED
    assert (task.life, task.step) == ("ended", 8)


def test_a_finished_task_keeps_nothing_but_its_last_step() -> None:
    world = running()
    world.progress("a", 9, 0.5)
    world.error(ErrorKind.PROCESS_EXIT, worker="n0/0", node="n0", task="a")
    world.finish()
    task = world.task()
    assert (task.life, cleared(world)) == ("ended", CLEARED)
    assert task.step == task.spec.steps


def test_a_stopped_task_keeps_its_step_and_the_checkpoint_that_it_wrote() -> None:
    world = broken_and_stopping()
    world.stopped(step=8, path="/saved")
    task = world.task()
    assert (task.life, cleared(world)) == ("ended", CLEARED)
    assert (task.step, task.checkpoint, task.checkpoint_step) == (8, "/saved", 8)


def test_a_stop_without_a_checkpoint_leaves_the_one_before() -> None:
    world = broken_and_stopping()
    world.stopped(step=8, path="")
    task = world.task()
    assert (task.step, task.checkpoint, task.checkpoint_step) == (8, "checkpoint-4", 4)


@pytest.mark.parametrize("path", ["/paused", ""])
def test_a_paused_task_keeps_its_step_and_goes_on_being_a_task(path: str) -> None:
    world = World()
    world.join("n0")
    world.join("n1")
    world.complete(world.submit("a", workers={"min": 4}))
    world.checkpoint(step=4)
    plan = world.lose("n1")
    assert world.stopped(step=8, path=path) is None
    task = world.task()
    assert (task.life, task.step, task.change) == ("active", 8, change_of(plan))
    assert (task.checkpoint, task.checkpoint_step) == ((path, 8) if path else ("checkpoint-4", 4))


def test_events_of_unknown_and_of_ended_tasks_change_nothing() -> None:
    world = running()
    world.finish()
    state = world.state
    for name in ("a", "nobody"):
        base: dict[str, Any] = {"event_id": "late", "occurred_at": world.now, "task": name, "generation": 1, "step": 3}
        for event in (TaskStopped(**base, path="/late"), TaskProgressed(**base, workers=1, step_s=0.5)):
            assert evolve(state, event, world.now) == state
    assert evolve(state, TaskCheckpointed(**base, path="/late"), world.now) == state


def test_progress_without_a_time_keeps_the_step_time() -> None:
    world = running()
    world.progress("a", 9, 0.5)
    world.progress("a", 10, 0.0)
    task = world.task()
    assert (task.step, task.step_s) == (10, 0.5)


def test_of_two_checkpoints_of_one_step_the_later_counts() -> None:
    world = running()
    world.checkpoint(step=4)
    generation = world.task().generation
    world.log(
        world.records[-1].event.model_copy(
            update={"event_id": "again", "path": "/again", "generation": generation},
        )
    )
    assert world.task().checkpoint == "/again"


def test_a_task_whose_worker_is_lost_while_it_pauses_pauses_again_beside_one_that_stops() -> None:
    """Two tasks leave when a node is lost, one for good and one until there is room: each is saved from who is left."""
    world = World()
    for node in ("n0", "n1", "n2"):
        world.join(node)
    world.complete(world.submit("a", workers={"min": 3, "max": 3}))
    world.complete(world.submit("b", workers={"min": 3, "max": 3}))
    world.stop("b")
    pausing = world.lose("n2")
    assert change_of(pausing, "a").action == "pause"
    left = world.task("a").owners
    plan = world.exit(left[0], task="a")
    change = change_of(plan, "a")
    assert change.action == "pause"
    assert left[0] in change.failed
    assert change.reason == "a worker was lost while it paused"
    assert workers(change.interrupted) == list(left[1:])
    assert plan.queued == {"a": "paused: a worker was lost while it paused"}


def test_a_stopping_task_that_lost_a_worker_stops_again_beside_one_that_trains_on() -> None:
    world = World()
    for node in ("n0", "n1"):
        world.join(node)
    world.complete(world.submit("a", workers={"min": 2, "max": 2}))
    world.complete(world.submit("b", workers={"min": 2, "max": 2}))
    world.stop("b")
    plan = world.exit(world.task("b").owners[0], task="b")
    assert [(change.task, change.action) for change in plan.changes] == [("b", "stop")]


def test_a_node_lost_under_a_stopping_task_is_the_reason_of_its_new_change() -> None:
    world = running()
    world.stop()
    plan = world.lose("n1")
    change = change_of(plan)
    assert (change.action, change.reason) == ("stop", "a worker was lost while it stopped")


def test_tasks_that_a_plan_stops_at_once_have_ids_of_the_plans_cause() -> None:
    world = World()
    world.submit("a", saved="/saved", step=9)
    world.stop()
    cause, plan, stopped = (record.event for record in world.records[-3:])
    assert (plan.event_id, stopped.event_id) == tuple(derived_id(cause.event_id, SERVICE, index) for index in (0, 1))


def test_a_stop_that_is_under_way_is_not_planned_again() -> None:
    world = running()
    world.stop()
    again = world.stop()
    assert (again.response, again.changes, again.supersedes) == (Response.NONE, [], [])


def test_a_name_used_again_while_processes_of_the_ended_task_are_left() -> None:
    world = running()
    members = world.task().members
    plan = world.finish()
    ended = world.task()
    assert ended.change is not None
    again = world.submit("a")
    task = world.task()
    assert again.supersedes == [plan.plan]
    assert set(members) <= set(task.occupied)
    assert task.life == "active"


def test_a_name_used_again_after_a_stop_does_not_go_on_stopping() -> None:
    """Only the end of a task's processes is left to do for its successor; a stop that was under way is over."""
    world = running()
    world.stop()
    stopping = world.task().change
    assert stopping is not None
    assert stopping.action == "stop"
    ended = world.stopped()
    assert ended is not None
    assert change_of(ended).action == "end"
    world.submit("a", saved="stop-checkpoint", step=5)
    task = world.task()
    assert not task.leaving
    assert task.members


def test_an_error_of_nothing_in_particular_is_answered_by_no_change() -> None:
    world = running()
    plan = world.error(ErrorKind.EXCEPTION, severity=Severity.SEV1)
    assert (plan.trigger, plan.response, plan.changes) == (Trigger.ERROR, Response.NONE, [])


def test_a_broken_collective_of_a_task_that_has_not_formed_yet_breaks_its_step() -> None:
    world = World()
    world.join("n0")
    world.submit("a")
    assert world.task().owners == ()
    world.error(ErrorKind.CONNECTION, task="a", severity=Severity.SEV3, generation=1)
    assert world.records[-1].event.type == "plan.decided"
    assert change_of(world.records[-1].event).action == "move"


def test_a_name_used_again_knows_the_processes_that_are_left_and_when_their_end_was_planned() -> None:
    world = running()
    world.finish()
    old = world.task()
    assert old.occupied
    submitted = TaskSubmitted(event_id="again", occurred_at=world.now, task="a", spec=old.spec)
    new = evolve(world.state, submitted, world.now).tasks["a"]
    assert (new.occupied, new.plan, new.planned_at, new.change) == (old.occupied, old.plan, old.planned_at, old.change)
    stopping = running()
    stopping.stop()
    state = stopping.state.with_changed("a", life="ended")
    assert evolve(state, submitted, stopping.now).tasks["a"].change is None


def test_the_solver_is_asked_without_the_tasks_that_a_plan_stops_at_once() -> None:
    world = running(nodes=1, workers=1)
    world.checkpoint(step=5)
    world.stop()
    last = ErrorDetected(
        **world.base(),
        incident="i",
        kind=ErrorKind.PROCESS_EXIT,
        severity=Severity.SEV2,
        method=Method.PROCESS_SUPERVISION,
        detected_at=world.now,
        worker="n0/0",
        node="n0",
        task="a",
    )
    state = evolve(world.state, last, world.now)
    assert (state.tasks["a"].broken, state.tasks["a"].lost) == (True, ("n0/0",))
    posed = asked(state, last)
    assert posed is not None
    task = posed.tasks["a"]
    assert task.life == "ended"
    assert {field: getattr(task, field) for field in ("members", "owners", "broken", "lost")} == {
        field: CLEARED[field] for field in ("members", "owners", "broken", "lost")
    }


def test_the_solver_is_not_asked_about_what_changes_no_workers() -> None:
    world = running()
    stop = TaskStopRequested(**world.base(), task="a")
    assert asked(evolve(world.state, stop, world.now), stop) is None
    progress = TaskProgressed(**world.base(), task="a", generation=1, step=3, workers=4, step_s=0.5)
    assert asked(world.state, progress) is None


def test_losing_the_last_worker_of_a_stopping_task_frees_its_room_at_once() -> None:
    world = World()
    world.join("n0", workers=1)
    world.complete(world.submit("a"))
    world.submit("b", workers={"min": 1})
    world.stop("a")
    assert change_of(world.exit("n0/0", task="a"), "b").prepare == ["n0/0"]


def test_a_stopping_task_that_keeps_workers_frees_none_yet() -> None:
    world = World()
    world.join("n0")
    world.complete(world.submit("a", workers={"min": 2}))
    world.submit("b", workers={"min": 1})
    world.stop("a")
    plan = world.exit("n0/0", task="a")
    assert [change.task for change in plan.changes] == ["a"]
    assert plan.problem is None


def test_a_task_that_cannot_be_saved_goes_on_with_the_workers_that_it_has() -> None:
    world = running()
    before = world.task()
    asked_to_stop = world.stop()
    plan = world.refuse_stop(asked_to_stop)
    assert (plan.trigger, plan.response, plan.changes) == (Trigger.STOP_REFUSED, Response.NONE, [])
    after = world.task()
    assert (after.life, after.members, after.generation) == ("active", before.members, before.generation)
    assert (after.change, after.owners, after.broken) == (None, before.owners, False)
    # It is a task like any other: it takes part in the next plan, and can be asked again.
    world.join("n9")
    assert len(world.task().members) > len(before.members)
    assert change_of(world.stop()).action == "stop"


def test_its_workers_stay_its_own_while_others_wait() -> None:
    world = running(workers=1)
    world.submit("b", weight=5.0, workers={"min": 2})
    plan = world.refuse_stop(world.stop())
    assert plan.changes == []
    assert len(world.task().members) == 2
    assert world.task("b").members == ()


def test_a_stop_that_may_lose_steps_is_tried_again_when_one_that_may_not_is_refused() -> None:
    world = running()
    first = world.stop()
    assert world.stop(lose_steps=True).changes == []  # the first may succeed
    plan = world.refuse_stop(first)
    assert change_of(plan).action == "stop"
    assert (change_of(plan).survivors, world.task().life) == (change_of(first).survivors, "stopping")


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_task_that_is_killed_ends_at_its_newest_checkpoint_and_its_workers_are_free(asked_before: bool) -> None:
    world = running()
    world.checkpoint(step=4)
    world.submit("b", workers={"min": 4})
    assert world.task("b").members == ()
    if asked_before:
        world.stop()
    workers_before = world.task().occupied
    plan = world.stop(at_once=True)
    change = change_of(plan)
    assert (change.action, change.hold, set(change.release)) == ("end", False, set(workers_before))
    assert change.reason == "its stop was requested; at once, without a checkpoint"
    assert (world.task().life, world.task().step) == ("ended", 4)
    assert len(world.task("b").members) == 4


def test_a_late_refusal_changes_nothing() -> None:
    world = running()
    first = world.stop()
    lost = world.task().owners[1]
    second = world.exit(lost)
    assert change_of(second).action == "stop"
    before = world.task()
    assert world.refuse_stop(first).changes == []
    assert world.task() == before
    world.stopped()
    ended = world.task()
    assert world.refuse_stop(second).changes == []
    assert world.task() == ended
