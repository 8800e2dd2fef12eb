"""``task.changed``: a plan of its own trigger, with the task's new weight and limits."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.planner.decide import DECIDER
from services.planner.replay.replay import Replayer, verify_records
from shared.events.plans import Response, Trigger
from shared.events.union import TaskChanged
from tests.planner.kit import START, World, change_of


def counts(world: World) -> tuple[int, int]:
    return len(world.task("a").members), len(world.task("b").members)


@pytest.fixture
def world() -> World:
    """Two tasks on eight workers; ``a`` is the lighter one, and has what ``b`` cannot use."""
    world = World(transition_prior_s=0.01, memory_copies=False)
    for index in range(4):
        world.join(f"n{index}")
    world.complete(world.submit("a", weight=1.0, workers={"min": 1}))
    world.complete(world.submit("b", weight=50.0, workers={"min": 1, "max": 7}))
    assert counts(world) == (2, 6)
    return world


def verified(world: World) -> None:
    """Check that the log is decided again to the byte, and passes as one of an older decider."""
    report = verify_records(world.records)
    assert (report.mismatches, report.ok, report.verified) == ([], True, report.plans)
    older = Replayer(world.records, decider=DECIDER + 1).verify()
    assert (older.mismatches, older.ok, older.older) == ([], True, older.plans)


def test_another_weight_moves_workers(world: World) -> None:
    plan = world.complete(world.change("a", weight=5000.0))
    assert (plan.trigger, plan.response) == (Trigger.TASK_CHANGED, Response.RECONFIGURE)
    assert counts(world) == (6, 2)
    assert {task.name: task.weight for task in world.solved(plan).tasks} == {"a": 5000.0, "b": 50.0}
    assert "task a was changed: weight 5000, 1 to any workers; 2 -> 6 workers" in change_of(plan, "a").reason
    verified(world)


def test_a_maximum_below_the_running_workers_shrinks_the_task(world: World) -> None:
    plan = world.complete(world.change("b", max_workers=2))
    assert counts(world) == (6, 2)
    assert [other.label for other in plan.alternatives if other.assignment["b"] > 2] == []
    verified(world)


def test_a_maximum_that_is_lifted_lets_the_task_grow(world: World) -> None:
    world.complete(world.change("b", max_workers=1))
    assert counts(world) == (6, 1)
    world.complete(world.change("b", max_workers=None, weight=1e6))
    assert counts(world) == (2, 6)
    verified(world)


def test_a_minimum_above_what_is_there_makes_the_task_wait(world: World) -> None:
    plan = world.change("b", min_workers=20, max_workers=None)
    world.stopped("b")  # its state is saved
    world.complete(plan)
    assert change_of(plan, "b").action == "pause"
    assert plan.queued == {"b": "paused: needs at least 20 workers; 8 can be had"}
    assert counts(world)[1] == 0
    world.complete(world.change("b", min_workers=1, max_workers=7))
    assert counts(world)[1] == 6
    verified(world)


def test_a_minimum_that_fits_takes_workers_from_the_others(world: World) -> None:
    world.complete(world.change("a", min_workers=5))
    assert counts(world)[0] >= 5
    assert counts(world)[1] >= 1
    verified(world)


def test_a_change_while_the_task_moves_takes_over_its_plan(world: World) -> None:
    moving = world.change("a", weight=5000.0)
    plan = world.change("a", weight=1.0)
    assert moving.plan in plan.supersedes
    world.complete(plan)
    assert counts(world) == (2, 6)
    verified(world)


def test_a_change_beside_a_lost_worker_counts_at_once(world: World) -> None:
    lost = world.task("b").members[0]
    world.exit(lost, task="b")
    world.complete(world.change("b", max_workers=3))
    assert len(world.task("b").members) == 3
    verified(world)


def test_two_faulted_tasks_one_of_which_may_have_less(world: World) -> None:
    """The alternative in which healthy tasks keep their counts is none, where one has more than it may have now."""
    world.exit(world.task("a").members[0], task="a")
    world.complete(world.change("b", max_workers=3))
    assert len(world.task("b").members) == 3
    verified(world)


def test_a_stopping_task_keeps_stopping(world: World) -> None:
    world.stop("b")
    plan = world.change("b", weight=3.0)
    assert [change.task for change in plan.changes if change.task == "b"] == []
    assert world.task("b").life == "stopping"
    verified(world)


def test_a_task_that_has_ended_meanwhile_stays_as_it_was(world: World) -> None:
    world.complete(world.finish("b"))
    plan = world.change("b", weight=3.0)
    assert (plan.trigger, plan.response, plan.changes) == (Trigger.TASK_CHANGED, Response.NONE, [])
    assert world.task("b").spec.weight == 50.0
    verified(world)


def test_a_task_that_waits_gets_workers_when_it_needs_fewer() -> None:
    world = World()
    world.join("n0")
    assert world.submit("a", workers={"min": 4}).queued
    world.complete(world.change("a", min_workers=2))
    assert len(world.task("a").members) == 2
    verified(world)


def test_a_change_that_no_specification_may_have_is_no_event() -> None:
    with pytest.raises(ValidationError, match="min_workers: 4 must not exceed max_workers, 3"):
        TaskChanged(event_id="x", occurred_at=START, task="a", weight=2.0, min_workers=4, max_workers=3)
