"""Nodes that are cordoned, drained and returned."""

from __future__ import annotations

from typing import Any

import pytest

from shared.events.plans import Response, Trigger
from shared.events.severities import ErrorKind, Severity
from tests.planner.kit import World, change_of, running, sources, workers


def limited(nodes: int, **fields: Any) -> World:
    """A world of nodes of one worker, in which task ``a`` runs."""
    world = World()
    for index in range(nodes):
        world.join(f"n{index}", 1)
    world.complete(world.submit("a", **fields))
    return world


def nodes_of(world: World, name: str = "a") -> set[str]:
    return {worker.partition("/")[0] for worker in world.task(name).members}


# ---- cordon


def test_what_runs_on_a_cordoned_node_stays_and_nothing_new_comes() -> None:
    world = limited(3, workers={"min": 1, "max": 2})
    idle = ({"n0", "n1", "n2"} - nodes_of(world)).pop()
    world.cordon(idle)
    plan = world.submit("b")
    assert plan.problem is not None
    assert plan.problem.workers == 2
    assert idle not in nodes_of(world) | nodes_of(world, "b")


def test_a_task_that_shrinks_keeps_its_workers_on_cordoned_nodes() -> None:
    """Those are of no use to the task for which it makes room."""
    world = running(3, 1)
    world.cordon("n0")
    change = change_of(world.submit("b", weight=3.0), "a")
    assert "n0/0" in workers(change.target)
    assert "n0" not in nodes_of(world, "b")
    assert nodes_of(world, "b")


def test_an_answer_that_needs_a_cordoned_worker_for_another_task_is_solved_again() -> None:
    """Two open workers are too few for the heavy task, and the other task leaves the node to it in vain."""
    world = World(allow_pausing=True)
    for index in range(3):
        world.join(f"n{index}", 1)
    world.complete(world.submit("a"))
    world.cordon("n0")
    plan = world.submit("b", weight=5.0, workers={"min": 3})
    assert plan.problem is not None
    assert plan.problem.workers == 2
    assert list(plan.queued) == ["b"]
    assert nodes_of(world) == {"n1", "n2"}


def test_a_failed_process_is_restarted_on_its_cordoned_node() -> None:
    world = running(2, 1)
    world.cordon("n1")
    plan = world.exit("n1/0")
    assert plan.response is Response.RESTART
    assert "n1/0" in workers(change_of(plan).target)


def test_a_cordon_holds_when_the_agent_is_started_again() -> None:
    world = running(2, 1)
    world.cordon("n1")
    world.complete(world.leave("n1"))
    assert world.join("n1", 1).changes == []
    assert nodes_of(world) == {"n0"}
    assert world.put_back("n1").trigger is Trigger.NODE_RETURNED
    assert nodes_of(world) == {"n0", "n1"}


# ---- drain


def test_a_task_shrinks_at_a_step_boundary() -> None:
    world = running(3, 1)
    plan = world.drain("n2")
    change = change_of(plan)
    assert (plan.trigger, plan.incident, change.action) == (Trigger.NODE_DRAINING, None, "move")
    assert (change.hold, change.interrupted, change.failed) == (False, None, [])
    assert change.release == ["n2/0"]
    assert sorted(workers(change.target)) == ["n0/0", "n1/0"]
    assert sources(change.target) == ["live", "live"]
    assert change.target is not None
    assert change.target.complete


def test_a_task_moves_to_an_idle_worker() -> None:
    world = limited(3, workers={"min": 1, "max": 2})
    idle = ({"n0", "n1", "n2"} - nodes_of(world)).pop()
    change = change_of(world.drain(sorted(nodes_of(world))[1]))
    assert change.prepare == [f"{idle}/0"]
    assert sources(change.target) == ["live", "take"]
    assert (change.hold, change.interrupted) == (False, None)


def test_a_task_that_fits_nowhere_else_saves_and_waits() -> None:
    world = limited(2, workers={"min": 2})
    plan = world.drain("n1")
    assert change_of(plan).action == "pause"
    assert "a" in plan.queued
    world.complete(plan)
    assert world.drained("n1").changes == []
    assert change_of(world.put_back("n1")).action == "move"


def test_a_task_whose_state_cannot_move_saves_and_is_read_again_elsewhere() -> None:
    """Each worker has a part of the optimizer; a process that leaves gives it to nobody."""
    world = limited(3, parallel={"distributed_optimizer": True}, workers={"min": 1, "max": 2})
    leaving = sorted(nodes_of(world))[0]
    plan = world.drain(leaving)
    change = change_of(plan)
    assert (change.action, change.hold) == ("pause", False)
    assert "its state cannot move" in change.reason
    world.stopped(step=7, path="saved")
    world.complete(plan)
    placed = world.task().change
    assert placed is not None
    assert sources(placed.target) == ["checkpoint", "checkpoint"]
    assert leaving not in nodes_of(world)
    assert world.drained(leaving).changes == []


def test_what_has_not_moved_in_time_saves_and_waits() -> None:
    world = running(3, 1)
    moving = world.drain("n2")
    plan = world.drain("n2", save=True)
    change = change_of(plan)
    assert plan.supersedes == [moving.plan]
    assert change.action == "pause"
    assert "not gone after 60 s" in change.reason
    assert nodes_of(world) == set()
    world.complete(plan)
    assert nodes_of(world) == {"n0", "n1"}
    assert world.drained("n2").changes == []


def test_a_fault_during_a_drain_keeps_the_node_out() -> None:
    world = running(3, 1)
    world.drain("n2")
    plan = world.exit("n1/0")
    assert plan.response is Response.RESTART
    assert sorted(workers(change_of(plan).target)) == ["n0/0", "n1/0"]


def test_a_drain_for_an_agent_ends_with_that_agent() -> None:
    world = running(2, 1)
    world.complete(world.drain("n1", by="agent"))
    plan = world.leave("n1")
    assert plan.changes == []
    assert world.state.losses == 0
    assert change_of(world.join("n1", 1)).prepare == ["n1/0"]


# ---- return


def test_an_isolated_node_is_used_again() -> None:
    world = running(2, 1)
    world.complete(world.exit("n1/0", severity=Severity.SEV1))
    assert not world.state.nodes["n1"].usable
    plan = world.put_back("n1")
    assert change_of(plan).prepare == ["n1/0"]
    assert world.state.nodes["n1"].usable


def test_a_failed_device_takes_its_node_also_while_the_restart_of_a_process_there_is_under_way() -> None:
    """The error of the device names no task; it escalates that of the process."""
    world = running(3, 1)
    restart = world.exit("n1/0")
    first = world.records[-2].event.event_id
    plan = world.error(ErrorKind.DEVICE, node="n1", escalates=first)
    assert (plan.response, plan.supersedes) == (Response.RECONFIGURE, [restart.plan])
    world.complete(plan)
    assert nodes_of(world) == {"n0", "n2"}
    assert world.state.incidents["n1"] == 1
    world.complete(world.put_back("n1"))
    assert nodes_of(world) == {"n0", "n1", "n2"}


@pytest.mark.parametrize("go", [World.lose, World.leave])
def test_a_node_without_an_agent_is_not_used(go: object) -> None:
    world = running(2, 1)
    world.complete(go(world, "n1"))  # type: ignore[operator]
    assert world.put_back("n1").changes == []
    assert not world.state.nodes["n1"].usable


def test_a_drain_can_be_taken_back() -> None:
    world = running(3, 1)
    world.complete(world.drain("n2"))
    assert change_of(world.put_back("n2")).prepare == ["n2/0"]
