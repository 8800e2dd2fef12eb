"""The look-ahead: every foreseen event is a hit, and a plan is the same to the byte whether looked up or solved."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.planner.lookahead.next_events import NodeClasses
from services.planner.lookahead.table import LookAhead
from services.planner.replay.replay import verify_records
from shared.events.plans import Problem, Solution
from shared.events.severities import ErrorKind
from shared.planning.instance import Inputs
from shared.planning.solver import solve_with_alternatives
from tests.planner.kit import World

Step = Callable[[World], object]


def course(solve: Callable[[Problem], tuple[Solution, list[Solution]]] = solve_with_alternatives) -> World:
    """Two tasks run on four nodes of two workers and one of three; one node is lost, and one task waits."""
    world = World(solve)
    for index in range(5):
        world.join(f"n{index}", 2)
    world.join("big", 3)
    world.complete(world.submit("a", weight=2.0, workers={"min": 2}))
    world.complete(world.submit("b", workers={"min": 2, "max": 6}))
    world.submit("c", workers={"min": 20})
    world.progress("a", step=9, step_s=0.123)
    world.complete(world.lose("n4"))
    return world


def lose(node: str) -> Step:
    return lambda world: world.lose(node)


NEXT: dict[str, Step] = {
    **{f"{node} lost": lose(node) for node in ("n0", "n1", "n2", "n3", "big")},
    "n4 back": lambda world: world.join("n4", 2),
    "a new node": lambda world: world.join("n9", 2),
    "a new node of another size": lambda world: world.join("big2", 3),
    "a finished": lambda world: world.finish("a"),
    "b failed": lambda world: world.fail("b"),
    "c finished": lambda world: world.finish("c"),
    "a worker lost for good": lambda world: world.error(ErrorKind.DEVICE, worker="n1/0", task="a"),
}


@pytest.mark.parametrize("step", NEXT.values(), ids=NEXT)
def test_each_next_event_is_a_hit_and_the_plan_is_that_of_a_fresh_solve(step: Step) -> None:
    table = LookAhead()
    world = course(table.solve)
    misses = table.misses
    assert table.rebuild(world.state, world.now)
    step(world)
    assert (table.hits, table.misses) == (1, misses)
    fresh = course()
    step(fresh)
    assert [r.event.canonical() for r in world.records] == [r.event.canonical() for r in fresh.records]
    assert verify_records(world.records).ok


@pytest.mark.parametrize(("first", "second"), [("n0", "n1"), ("n1", "n0"), ("n2", "big"), ("big", "n3")])
def test_a_second_loss_right_after_the_first_plan_is_a_hit(first: str, second: str) -> None:
    table = LookAhead()
    world = course(table.solve)
    misses = table.misses
    table.rebuild(world.state, world.now)
    world.lose(first)
    world.lose(second)
    assert (table.hits, table.misses) == (2, misses)
    assert verify_records(world.records).ok


def test_a_change_makes_old_answers_go_and_new_ones_come() -> None:
    table = LookAhead()
    world = course(table.solve)
    table.rebuild(world.state, world.now)
    world.progress("a", step=10, step_s=0.9)  # another throughput: no problem is what it was
    misses = table.misses
    world.complete(world.lose("n0"))
    assert (table.hits, table.misses) == (0, misses + 1)
    table.rebuild(world.state, world.now)
    world.lose("n1")
    assert (table.hits, table.misses) == (1, misses + 1)


def test_a_rebuild_gives_way_to_the_next_change_and_goes_on_where_it_was() -> None:
    table = LookAhead()
    world = course(table.solve)
    answers = iter([True, True, False])
    assert not table.rebuild(world.state, world.now, lambda: next(answers))
    assert len(table) == 2
    assert table.rebuild(world.state, world.now)
    assert len(table) > 12


def test_nodes_of_which_the_same_tasks_have_as_much_are_one_class() -> None:
    world = World()
    for index in range(40):
        world.join(f"n{index:02d}", 2)
    world.complete(world.submit("a", batch={"global": 60, "micro": 1}))
    classes = NodeClasses().of(world.state)
    assert sorted((c.hardware, c.workers, c.shares) for c in classes) == [
        ("cpu", 2, (("a", 1, 1, 1),)),
        ("cpu", 2, (("a", 2, 2, 2),)),
    ]


def test_the_key_is_all_of_the_problem_and_nothing_else() -> None:
    world = course()
    plan = world.lose("n0")
    problem = world.solved(plan)
    key = Inputs.of(problem).key()
    assert Inputs.of(Problem.model_validate_json(problem.model_dump_json())).key() == key
    task = problem.tasks[0]
    table = {**task.throughput, 2: task.throughput[2] * (1 + 2**-50)}
    for change in (
        {"weight": 2.5},
        {"necessary": 3},
        {"maximum": 3},
        {"current": 1},
        {"faulted": not task.faulted},
        {"required": not task.required},
        {"running_s": task.running_s + 1},
        {"transition_s": task.transition_s + 1},
        {"transition_to_s": {3: 1.0}},
        {"staying": task.staying + 1},
        {"newcomers_s": task.newcomers_s + 1},
        {"throughput": table},
    ):
        changed = problem.model_copy(update={"tasks": [task.model_copy(update=change), *problem.tasks[1:]]})
        assert Inputs.of(changed).key() != key, change
    assert Inputs.of(problem.model_copy(update={"workers": problem.workers + 1})).key() != key
