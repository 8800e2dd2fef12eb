"""Kinds of workers: each pool is solved by itself, tasks stay on their kind, and the whole is put together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.lookahead.table import LookAhead
from services.planner.problem.problem import Solve
from services.planner.replay.replay import verify_records
from services.planner.state.cluster import State, Task, node_of
from services.planner.state.pools import settle
from shared.errors import InvalidInput
from shared.events.plans import Problem, TaskProblem
from shared.planning.solver import evaluate, pools_of, solve, solve_with_alternatives, solve_with_proof
from tests.planner.kit import World, change_of, spec

FAST, SLOW = "a100-80", "a800-80"  # they differ in their links alone: a task is as well off on either


def task(name: str, pool: str = "", **fields: object) -> TaskProblem:
    base = {
        "weight": 1.0,
        "necessary": 1,
        "maximum": 8,
        "current": 0,
        "transition_s": 1.0,
        "running_s": 10.0,
        "throughput": {k: float(k) for k in range(1, 9)},
    }
    return TaskProblem.model_validate({"name": name, "pool": pool, **base, **fields})


# ---- the solver


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to three pools with up to two tasks each; names in no order of pools."""
    pools = {pool: draw(st.integers(0, 4)) for pool in ["x", "y", "z"][: draw(st.integers(1, 3))]}
    names = draw(st.permutations(["a", "b", "c", "d", "e", "f"]))
    tasks = [
        task(
            name,
            pool,
            weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
            current=draw(st.integers(0, 3)),
            faulted=draw(st.booleans()),
            throughput={k: float(draw(st.integers(0, 4))) for k in range(1, 5)},
        )
        for name, pool in zip(names, [pool for pool in pools for _ in range(draw(st.integers(0, 2)))], strict=False)
    ]
    return Problem(workers=sum(pools.values()), tasks=tasks, pools=pools)


@given(problems())
@settings(deadline=None, derandomize=True)
def test_the_whole_is_made_of_the_pools(problem: Problem) -> None:
    best, alternatives = solve_with_alternatives(problem)
    used = dict.fromkeys(problem.pools, 0)
    for item in problem.tasks:
        used[item.pool] += best.assignment[item.name]
    assert all(used[pool] <= problem.pools[pool] for pool in used)
    assert list(best.assignment) == sorted(task.name for task in problem.tasks)
    for part in pools_of(problem):
        assert solve(part).assignment.items() <= best.assignment.items()
    solution, proof = solve_with_proof(problem)
    assert solution == best
    assert proof.bound == pytest.approx(best.objective, rel=1e-12, abs=1e-9)
    for solution in alternatives:
        assert solution == evaluate(problem, solution.assignment, solution.label)
        assert solution.objective <= best.objective + 1e-9


@given(problems())
@settings(deadline=None, derandomize=True)
def test_the_second_best_is_the_best_of_all_others(problem: Problem) -> None:
    best, alternatives = solve_with_alternatives(problem)
    others = []
    useful = [
        sorted(
            {0, t.current, *(k for k, rate in t.throughput.items() if rate > 0)} & set(range(problem.pools[t.pool] + 1))
        )
        for t in problem.tasks
    ]
    for choice in itertools.product(*useful):
        assignment = {t.name: k for t, k in zip(problem.tasks, choice, strict=True)}
        used = dict.fromkeys(problem.pools, 0)
        for t in problem.tasks:
            used[t.pool] += assignment[t.name]
        if assignment != best.assignment and all(used[pool] <= problem.pools[pool] for pool in used):
            others.append(evaluate(problem, assignment, "").objective)
    second = [s.objective for s in alternatives if s.label == "second-best"]
    assert len(second) == min(len(others), 1)
    assert second == pytest.approx([max(others)] if others else [])


def test_bad_pools_are_refused() -> None:
    with pytest.raises(InvalidInput, match="task a: there is no pool 'z'"):
        solve(Problem(workers=4, tasks=[task("a", "z")], pools={"x": 4}))
    with pytest.raises(InvalidInput, match="pools: they have 4 workers, not 5"):
        solve(Problem(workers=5, tasks=[task("a", "x")], pools={"x": 4}))


# ---- the rule

Rates = dict[tuple[str, str], float]


def settled(sizes: dict[str, int], rates: Rates, *tasks: Task) -> dict[str, tuple[str, bool]]:
    """Pool of each task and whether it counts as faulted; T is linear, at a rate for each task and kind."""

    def pose(item: Task, pool: str) -> TaskProblem:
        rate = rates.get((item.name, pool), 1.0)
        table = {k: rate * k for k in range(item.spec.workers.min, sizes[pool] + 1)}
        return task(
            item.name, pool, weight=item.spec.weight, necessary=item.spec.workers.min, maximum=99, throughput=table
        )

    return {found.name: (found.pool, found.faulted) for found in settle(State(), tasks, sizes, pose)}


def running(name: str, kind: str, least: int = 1, weight: float = 1.0) -> Task:
    return Task(spec=spec(name, workers={"min": least}, weight=weight), members=("?/0",), pool=kind)


def waiting(name: str, least: int = 1, weight: float = 1.0) -> Task:
    return Task(spec=spec(name, workers={"min": least}, weight=weight))


def test_a_running_task_stays_on_its_kind_though_another_is_faster_and_idle() -> None:
    assert settled({FAST: 8, SLOW: 4}, {("a", FAST): 9.0}, running("a", SLOW)) == {"a": (SLOW, False)}


def test_a_new_task_goes_where_its_fair_share_does_most() -> None:
    sizes = {FAST: 8, SLOW: 8}
    rates = {(name, FAST): 3.0 for name in ("a", "b", "c")}
    assert settled(sizes, rates, waiting("a")) == {"a": (FAST, False)}
    # Alone on 8 slow workers it does 8; as one of four on 8 fast ones it would do 6.
    crowd = [running(name, FAST) for name in ("d", "e", "f")]
    assert settled(sizes, rates, *crowd, waiting("a"))["a"] == (SLOW, False)


def test_a_task_whose_kind_has_become_too_small_moves_and_is_disturbed() -> None:
    assert settled({FAST: 8, SLOW: 2}, {}, running("a", SLOW, least=4)) == {"a": (FAST, True)}
    # The heavier one stays where there is room for one of them only.
    both = settled({FAST: 8, SLOW: 4}, {}, running("a", SLOW, least=3), running("b", SLOW, least=3, weight=2.0))
    assert both == {"a": (FAST, True), "b": (SLOW, False)}


def test_a_task_that_fits_nowhere_waits_where_it_would_alone() -> None:
    sizes = {FAST: 4, SLOW: 8}
    assert settled(sizes, {}, running("a", SLOW, least=6), waiting("b", least=6))["b"] == (SLOW, False)
    assert settled(sizes, {}, waiting("b", least=20)) == {"b": (SLOW, False)}


# ---- the planner


def two_kinds(solve: Solve = solve_with_alternatives) -> World:
    world = World(solve)
    for index in range(2):
        world.join(f"fast{index}", 2, hardware=FAST)
        world.join(f"slow{index}", 2, hardware=SLOW)
    world.complete(world.submit("a", workers={"min": 2}))
    world.complete(world.submit("b", workers={"min": 2}))
    return world


def kinds(world: World, name: str) -> set[str]:
    return {world.state.nodes[node_of(worker)].hardware for worker in world.task(name).members}


def test_tasks_run_on_one_kind_each_and_the_plan_says_which() -> None:
    world = two_kinds()
    assert [len(world.task(name).members) for name in ("a", "b")] == [4, 4]
    assert kinds(world, "a") | kinds(world, "b") == {FAST, SLOW}
    plan = world.join("fast2", 1, hardware=FAST)
    assert plan.problem is not None
    assert plan.problem.pools == {FAST: 5, SLOW: 4}
    assert {t.name: {t.pool} for t in plan.problem.tasks} == {name: kinds(world, name) for name in ("a", "b")}
    assert verify_records(world.records).ok


def test_a_pool_that_is_gone_sends_its_task_to_the_other() -> None:
    world = two_kinds()
    (mine,), (other,) = kinds(world, "a"), kinds(world, "b")
    nodes = sorted({node_of(worker) for worker in world.task("a").members})
    world.complete(world.lose(nodes[0]))
    assert (len(world.task("a").members), kinds(world, "a")) == (2, {mine})
    plan = world.complete(world.lose(nodes[1]))
    assert change_of(plan, "a").action == "move"
    assert kinds(world, "a") == kinds(world, "b") == {other}
    assert [len(world.task(name).members) for name in ("a", "b")] == [2, 2]
    assert verify_records(world.records).ok


def test_no_task_has_workers_with_and_without_devices() -> None:
    """Not even where all of them together would be as many as it needs."""
    world = World()
    for name, kind in (("c0", "cpu"), ("g0", "h100"), ("c1", "cpu")):
        world.join(name, 2, hardware=kind)
    world.submit("wide", workers={"min": 5, "max": 6})
    assert world.task("wide").members == ()
    world.complete(world.submit("some", workers={"min": 1, "max": 6}))
    first = kinds(world, "some")
    assert first in ({"cpu"}, {"h100"})
    for name in sorted({node_of(worker) for worker in world.task("some").members}):
        world.complete(world.lose(name))
    assert kinds(world, "some") == {"cpu", "h100"} - first
    world.complete(world.join("g1", 6, hardware="h100"))
    assert kinds(world, "wide") == {"h100"}
    assert len(kinds(world, "some")) == 1
    assert verify_records(world.records).ok


@pytest.mark.parametrize(
    "step",
    [
        lambda world: world.lose("fast0"),
        lambda world: world.lose("slow1"),
        lambda world: world.finish("a"),
        lambda world: world.finish("b"),
        lambda world: world.join("fast9", 2, hardware=FAST),
        lambda world: world.join("slow0", 2, hardware=SLOW),
        lambda world: (world.lose("fast0"), world.lose("fast1")),
        lambda world: (world.lose("slow0"), world.lose("fast1")),
    ],
)
def test_what_comes_next_is_known_pool_by_pool(step: Callable[[World], object]) -> None:
    table = LookAhead()
    world = two_kinds(table.solve)
    misses = table.misses
    table.rebuild(world.state, world.now)
    step(world)
    assert table.misses == misses
    assert verify_records(world.records).ok
