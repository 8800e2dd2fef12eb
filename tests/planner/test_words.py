"""The explanation of a plan in words: what was decided, and its cost (``services.api.plan_text``)."""

from __future__ import annotations

import hashlib
import json

from services.api.plan_text import explain
from shared.model import canonical_json
from tests.planner.kit import World, running


def test_a_restart_is_explained_with_its_stages() -> None:
    world = running()
    a, b, c, d = world.task().members
    text = explain(world.exit(b))
    assert "finishes the interrupted step as generation 2, 3 workers" in text
    assert f"{a} {c} {d} keep their state; {b} take it from a live rank" in text
    assert "no solver asked" in text


def test_a_node_loss_is_explained_with_terms_and_alternatives() -> None:
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


def test_transitions_are_explained_by_kind_with_the_digest() -> None:
    world = World(starvation_s=60.0)
    for index in range(3):
        world.join(f"n{index}")
    started = world.submit("a", workers={"max": 4})
    assert "less 0 FLOP for a start" in explain(started)
    plan = world.complete(started)
    node = world.task().members[0].partition("/")[0]
    lost = world.lose(node)
    text = explain(lost)
    assert " s as others join" in text
    assert f"canonical JSON): {lost.inputs_sha256}" in text
    assert plan.inputs_sha256 != lost.inputs_sha256
    assert lost.problem is not None
    text_of_problem = json.loads(lost.canonical())["problem"]
    assert hashlib.sha256(canonical_json(text_of_problem).encode()).hexdigest() == lost.inputs_sha256
    assert lost.problem.sha256() == lost.inputs_sha256


def test_a_starving_task_and_the_paused_one_are_named() -> None:
    world = World(starvation_s=60.0)
    world.join("n0")
    world.complete(world.submit("a", workers={"min": 2}))
    world.submit("b", workers={"min": 2})
    plan = world.age()
    assert plan is not None
    text = explain(plan)
    assert "answers task-starving, a task that has waited too long for workers" in text
    assert "for a pause of" in text
    assert "Task a waits: paused: needs at least 2 workers; the 2 there are go first to b" in text


def test_a_measured_correction_and_the_kinds_of_workers_are_explained() -> None:
    world = running()
    plan = world.lose("n1")
    assert plan.problem is not None
    tasks = [task.model_copy(update={"pool": "h100", "correction": 1.21}) for task in plan.problem.tasks]
    problem = plan.problem.model_copy(update={"tasks": tasks, "pools": {"a100-80": 4, "h100": 2}})
    text = explain(plan.model_copy(update={"problem": problem}))
    assert "of kind h100: 2 of 2" in text
    assert "of kind a100-80: 0 of 4" in text
    assert "on h100, measured 1.21 x the modelled throughput, lost a worker" in text
