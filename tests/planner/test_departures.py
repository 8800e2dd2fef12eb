"""Nodes that leave in order: the workers are gone, and nothing is learnt about failures."""

from __future__ import annotations

from shared.events.plans import Response, Trigger
from tests.planner.kit import World, change_of, running, sources, workers


def horizon_s(world: World, node: str) -> float:
    """D_running in the next plan, which a node's rejoining asks for."""
    plan = world.join(node)
    assert plan.problem is not None
    return plan.problem.tasks[0].running_s


def test_survivors_finish_the_step_and_go_on() -> None:
    world = running()
    survivors = [w for w in world.task().members if w.startswith("n0/")]
    plan = world.leave("n1")
    change = change_of(plan)
    assert (plan.trigger, plan.incident, plan.response) == (Trigger.NODE_LEFT, None, Response.RECONFIGURE)
    assert workers(change.interrupted) == survivors
    assert sources(change.interrupted) == ["live", "live"]
    assert set(change.failed) == {"n1/0", "n1/1"}
    assert change.reason.startswith("node n1 left: asked to end")


def test_it_is_no_failure() -> None:
    lost, left = running(mtbf_node_s=100.0), running(mtbf_node_s=100.0)
    for world in (lost, left):
        world.wait(1000.0)
    lost.complete(lost.lose("n1"))
    left.complete(left.leave("n1"))
    assert (lost.state.losses, left.state.losses) == (1, 0)
    assert left.state.node_s == lost.state.node_s >= 1000.0
    assert left.state.incidents == {}
    assert horizon_s(left, "n1") > horizon_s(lost, "n1")


def test_all_nodes_leave_and_come_back() -> None:
    """The planned stop of a whole stack: the task waits, and goes on from its checkpoint."""
    world = running()
    world.checkpoint(step=5)
    plans = [world.leave(node) for node in ("n0", "n1")]
    assert change_of(plans[1]).action == "pause"
    assert "a" in plans[1].queued
    world.complete(plans[1])
    change = change_of(world.join("n0"))
    assert sources(change.target) == ["checkpoint", "checkpoint"]
    assert change.target is not None
    assert change.target.checkpoint == "checkpoint-5"


def test_an_agent_of_the_past_leaves_nothing() -> None:
    world = running()
    plan = world.leave("n1", incarnation="another")
    assert (plan.response, plan.changes) == (Response.NONE, [])
    assert world.state.nodes["n1"].usable
