"""The life of a task: submitted, queued, paused, stopped, ended, and its name used again."""

from __future__ import annotations

from shared.events.plans import Response, Trigger
from shared.events.severities import ErrorKind
from tests.planner.kit import World, change_of, running, sources, workers


def test_a_submitted_task_starts_on_all_useful_workers_from_its_initial_state() -> None:
    world = World()
    assert world.join("n0").response is Response.NONE
    world.join("n1")
    plan = world.submit("a", workers={"max": 3})
    change = change_of(plan)
    assert (plan.trigger, plan.response) == (Trigger.TASK_SUBMITTED, Response.RECONFIGURE)
    assert change.interrupted is None
    assert not change.hold
    assert sources(change.target) == ["initial"] * 3
    assert change.target is not None
    assert (change.target.generation, change.target.layout.data) == (1, 3)
    # Spread over nodes: each has one before either has two.
    assert {w.split("/")[0] for w in workers(change.target)[:2]} == {"n0", "n1"}
    assert sorted(change.prepare) == sorted(workers(change.target))


def test_a_resumed_task_starts_from_its_checkpoint() -> None:
    world = World()
    world.join("n0")
    change = change_of(world.submit("a", saved="saved", step=9))
    assert change.target is not None
    assert sources(change.target) == ["checkpoint"] * 2
    assert change.target.checkpoint == "saved"
    assert world.task().step == 9


def test_a_task_that_needs_more_than_there_is_is_queued_and_runs_when_it_can() -> None:
    world = World()
    world.join("n0")
    plan = world.submit("a", workers={"min": 4})
    assert plan.response is Response.NONE
    assert plan.queued == {"a": "needs at least 4 workers; 2 can be had"}
    assert world.error(ErrorKind.EXCEPTION, task="a").queued == plan.queued
    plan = world.join("n1")
    assert plan.queued == {}
    assert len(change_of(plan).prepare) == 4


def test_a_task_below_its_minimum_is_paused_and_comes_back_from_its_checkpoint() -> None:
    world = running(workers=2, nodes=2)
    world2 = World()
    world2.join("n0")
    world2.join("n1")
    world2.complete(world2.submit("a", workers={"min": 4}))
    plan = world2.lose("n1")
    change = change_of(plan)
    assert change.action == "pause"
    assert [w.split("/")[0] for w in workers(change.interrupted)] == ["n0", "n0"]
    assert sorted(change.release) == sorted(change.survivors)
    assert list(plan.queued) == ["a"]
    assert world2.stopped("a", step=8, path="paused") is None
    world2.complete(plan)
    assert world2.task().life == "active"
    back = change_of(world2.join("n1"))
    assert back.target is not None
    assert (sources(back.target), back.target.checkpoint) == (["checkpoint"] * 4, "paused")
    assert world.task().members


def test_a_task_whose_nodes_come_back_while_it_pauses_is_placed_once_it_has() -> None:
    """As after a power cut: the nodes join one after the other, and while the task leaves it is given nothing."""
    world = World()
    for node in ("n0", "n1"):
        world.join(node)
    world.complete(world.submit("a", workers={"min": 4}))
    pausing = world.lose("n0")
    assert change_of(pausing).action == "pause"
    again = world.lose("n1")
    assert change_of(again).reason == "a worker was lost while it paused"
    for node in ("n1", "n0"):
        assert world.join(node).changes == []
    world.complete(again)
    change = world.task().change
    assert change is not None
    assert (change.action, change.reason) == ("move", "task a has paused; 0 -> 4 workers")
    assert len(world.task().members) == 4


def test_a_task_that_has_paused_and_for_which_there_is_still_no_room_waits() -> None:
    world = World()
    for node in ("n0", "n1"):
        world.join(node)
    world.complete(world.submit("a", workers={"min": 4}))
    plans = world.state.plans
    world.complete(world.lose("n1"))
    assert world.state.plans == plans + 2
    assert world.task().queued == "needs at least 4 workers; 2 can be had"
    assert world.task().members == ()


def test_a_finished_task_leaves_its_workers_to_the_other() -> None:
    world = World()
    world.join("n0")
    world.join("n1")
    world.complete(world.submit("a", workers={"min": 2, "max": 2}))
    world.complete(world.submit("b", workers={"min": 1}))
    freed = set(world.task("a").members)
    plan = world.finish("a")
    assert plan.trigger is Trigger.TASK_ENDED
    end, grown = change_of(plan, "a"), change_of(plan, "b")
    assert (end.action, set(end.release)) == ("end", freed)
    assert freed <= set(grown.prepare)
    assert grown.interrupted is None
    world.complete(plan)
    assert world.task("a").occupied == ()
    assert world.task("b").change is None


def test_a_failed_task_is_ended_and_its_nodes_are_not_blamed() -> None:
    world = running()
    members = world.task().members
    change = change_of(world.fail())
    assert (change.action, change.release) == ("end", sorted(members))
    assert all(node.usable for node in world.state.nodes.values())
    assert world.exit(members[0]).changes == []


def test_a_stop_drains_saves_and_frees_the_workers_once_done() -> None:
    world = running()
    members = world.task().members
    plan = world.stop()
    change = change_of(plan)
    assert (plan.trigger, change.action, change.target) == (Trigger.STOP_REQUESTED, "stop", None)
    assert change.survivors == list(members)
    assert not change.hold
    queued = world.submit("b")
    assert queued.queued == {"b": "no layout of it runs on 0 workers"}
    ended = world.stopped("a")
    assert ended is not None
    assert set(change_of(ended, "b").prepare) == set(members)
    assert world.stop().changes == []


def test_a_stop_of_a_queued_task_is_done_at_once() -> None:
    world = World()
    world.submit("a", saved="saved", step=9)
    plan = world.stop()
    assert (plan.response, plan.changes, plan.queued) == (Response.NONE, [], {})
    last = world.records[-1].event
    assert last.type == "task.stopped"
    assert (last.task, last.path, last.step) == ("a", "saved", 9)
    assert world.task().life == "ended"


def test_a_stop_of_a_starting_task_ends_it_and_offers_its_workers() -> None:
    world = World()
    world.join("n0")
    world.submit("a")
    world.submit("b", workers={"min": 2})
    assert world.task("b").members == () or world.task("a").members == ()
    starting, waiting = ("a", "b") if world.task("a").members else ("b", "a")
    plan = world.stop(starting)
    assert change_of(plan, starting).action == "end"
    assert len(change_of(plan, waiting).prepare) == 2
    assert world.task(starting).life == "ended"


def test_a_fault_while_the_task_stops_still_saves_its_state() -> None:
    world = running()
    a, b, c, d = world.task().members
    first = world.stop()
    plan = world.exit(b)
    change = change_of(plan)
    assert plan.supersedes == [first.plan]
    assert change.action == "stop"
    assert workers(change.interrupted) == [a, c, d]
    assert change.failed == [b]


def test_losing_everybody_while_it_stops_ends_the_task_at_its_checkpoint() -> None:
    world = running(nodes=1, workers=1)
    world.checkpoint(step=5)
    world.stop()
    plan = world.exit("n0/0")
    assert change_of(plan).action == "end"
    last = world.records[-1].event
    assert last.type == "task.stopped"
    assert (last.step, last.path) == (5, "checkpoint-5")


def test_a_name_may_be_used_again_and_its_generations_go_on() -> None:
    world = running()
    world.complete(world.stop())
    plan = world.stopped("a", step=7, path="saved")
    assert plan is not None
    again = change_of(world.submit("a", saved="saved", step=7))
    assert again.target is not None
    assert again.target.generation == 2
    assert world.task().life == "active"
