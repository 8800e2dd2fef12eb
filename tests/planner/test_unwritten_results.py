"""A task that cannot write its result: others get its workers, and it has its own back to write only."""

from __future__ import annotations

from typing import Any

import pytest

from services.planner.decide import DECIDER
from services.planner.replay.replay import Replayer, verify_records
from services.planner.timers import next_timer
from shared.events.plans import Response, Trigger
from shared.events.union import PlanDecided, TaskResumeRequested
from tests.planner.kit import UNWRITTEN, World, change_of, running, workers


def limited(of_node: int, limits: dict[str, int], **parameters: Any) -> World:
    """A task that runs on some of the workers of two nodes. ``parameters``: of the cluster."""
    world = World(**parameters)
    for node in ("n0", "n1"):
        world.join(node, of_node)
    world.complete(world.submit("a", workers=limits))
    return world


def lent(world: World, *, saved: bool = False) -> PlanDecided:
    """Have the task leave its workers, and return the plan that follows."""
    if saved:
        world.checkpoint(step=world.task().spec.steps)
    plan = world.unwritten()
    assert change_of(plan).action == "pause"
    if not saved:
        world.stopped(step=world.task().spec.steps, path="")
    return world.complete(plan)


@pytest.mark.parametrize("saved", [False, True])
def test_a_task_that_cannot_write_its_result_has_no_workers_and_says_why(saved: bool) -> None:
    world = running()
    plan = lent(world, saved=saved)
    change = change_of(plan)
    assert (plan.trigger, plan.response) == (Trigger.RESULT_UNWRITTEN, Response.RECONFIGURE)
    # What is not saved is in the processes, and in their nodes' memory: they save what they can, and end in order.
    assert bool(change.survivors) is not saved
    assert plan.queued == {"a": f"waits for its storage: {UNWRITTEN}"}
    assert world.task().members == ()
    assert world.join("n9").queued["a"].startswith("waits for its storage")


def beside(world: World, **limits: int | None) -> tuple[str, ...]:
    """Let a second task have all workers while the first cannot write its result; return those of the first."""
    home = world.task().members
    world.complete(lent(world))
    world.complete(world.submit("b", workers=limits))
    assert len(world.task("b").members) == len(world.state.usable_workers())
    return home


def test_others_get_its_workers_meanwhile_and_give_the_same_ones_back() -> None:
    """What it has done is in the memory of their nodes alone."""
    world = limited(2, {"min": 2, "max": 2})
    home = beside(world, min=1)
    plan = world.write_again()
    assert tuple(workers(change_of(plan).target)) == home
    assert not set(workers(change_of(plan, "b").target)) & set(home)
    world.complete(plan)
    assert world.task().members == home
    assert next_timer(world.state) is None


def test_one_worker_of_each_node_is_enough_to_have_what_is_in_their_memory() -> None:
    world = running(nodes=2, workers=2)
    home = beside(world, min=2)
    plan = world.write_again()
    mine, others = workers(change_of(plan).target), workers(change_of(plan, "b").target)
    assert len(home) == 4
    assert {worker[:2] for worker in mine} == {"n0", "n1"}
    assert set(mine) < set(home)
    assert len(others) == 4 - len(mine)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {"distributed_optimizer": True}])
def test_a_divided_task_has_each_part_back_where_it_was(parallel: dict[str, Any]) -> None:
    world = running(nodes=2, workers=2, parallel=parallel)
    layout = world.task().layout
    home = beside(world, min=1)
    assert len(home) == 4
    world.stop("b")
    world.stopped("b")
    change = change_of(world.write_again())
    assert tuple(workers(change.target)) == home
    assert change.target is not None
    assert change.target.layout == layout


def test_whose_state_is_saved_gets_any_workers() -> None:
    world = limited(1, {"min": 1, "max": 1})
    (home,) = world.task().members
    lent(world, saved=True)
    world.complete(world.submit("b", workers={"min": 1, "max": 1}))
    assert home in world.task("b").members
    plan = world.write_again()
    assert [change.task for change in plan.changes] == ["a"]
    assert home not in workers(change_of(plan).target)


def test_where_others_come_first_it_waits_on_and_nobody_is_disturbed() -> None:
    world = limited(1, {"min": 1, "max": 1}, starvation_s=600.0)
    home = beside(world, min=2, max=2)
    plan = world.write_again()
    assert plan.changes == []
    assert plan.queued["a"].startswith(f"waits for its storage: what it has done is in the memory of {home[0][:2]}")
    assert next_timer(world.state) is not None
    starving = world.age()
    assert starving is not None
    assert tuple(workers(change_of(starving).target)) == home


def test_workers_of_a_lost_node_are_not_waited_for() -> None:
    world = limited(1, {"min": 1, "max": 2})
    home = world.task().members
    lent(world)
    world.lose(home[0].partition("/")[0])
    assert workers(change_of(world.write_again()).target) == [home[1]]


def test_an_operator_who_has_made_room_need_not_wait() -> None:
    world = running()
    home = world.task().members
    lent(world)
    plan = world.must(TaskResumeRequested(**world.base(), task="a"))
    assert tuple(workers(change_of(plan).target)) == home
    assert next_timer(world.state) is None


@pytest.mark.parametrize("stale", [{"generation": 0}, {"task": "unknown"}])
def test_an_old_report_changes_nothing(stale: dict[str, Any]) -> None:
    world = running()
    plan = world.unwritten(**stale)
    assert plan.changes == []
    assert next_timer(world.state) is None


def test_it_can_be_stopped() -> None:
    world = running()
    lent(world)
    world.stop()
    assert world.task().life == "ended"
    assert next_timer(world.state) is None


def test_an_open_try_that_is_in_vain_is_one_more_wait() -> None:
    world = running()
    home = world.task().members
    lent(world)
    world.complete(world.write_again())
    lent(world)
    assert world.task().home == home
    assert next_timer(world.state) is not None


def test_plans_that_give_workers_back_contradict_nothing() -> None:
    """They are checked as those of an older decider are, and decided again."""
    world = running(nodes=2, workers=2)
    beside(world, min=1)
    assert change_of(world.write_again()).target is not None
    assert verify_records(world.records).ok
    assert Replayer(world.records, decider=DECIDER + 1).verify().ok
