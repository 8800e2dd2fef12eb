"""The explanation names what was decided and its price."""

from __future__ import annotations

from shared.plan_words import explain
from tests.planner.kit import World, running


def test_a_restart_is_told_with_its_stages() -> None:
    world = running()
    a, b, c, d = world.task().members
    text = explain(world.exit(b))
    assert "finishes the interrupted step as generation 2, 3 workers" in text
    assert f"{a} {c} {d} keep their state; {b} take it from a live rank" in text
    assert "no solver asked" in text


def test_a_node_loss_is_told_with_terms_and_alternatives() -> None:
    world = World()
    for index in range(3):
        world.join(f"n{index}")
    world.complete(world.submit("a"))
    world.complete(world.submit("b", weight=2.0))
    plan = world.lose("n0")
    text = explain(plan)
    assert plan.incident is not None
    assert plan.incident in text
    assert "of 4 workers are used; the plan is worth" in text
    assert "lost a worker" in text
    assert "Turned down:" in text
    assert "second best" in text
    for term in plan.solution.terms if plan.solution else ():
        assert f"  {term.name} (weight" in text


def test_waiting_tasks_and_superseded_plans_are_named() -> None:
    world = running(nodes=1)
    first = world.exit("n0/0")
    world.submit("big", workers={"min": 9})
    second = world.exit("n0/1")
    text = explain(second)
    assert f"takes over from {first.plan}" in text
    assert "Task big waits: needs at least 9 workers" in text
