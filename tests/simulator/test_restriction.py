"""Problems in which no healthy task loses a worker: against the definition, and against the free solver."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidInput
from shared.events.plans import Problem, TaskProblem
from shared.planning.solver import evaluate, solve_with_alternatives
from shared.planning.waf import waf_flop_per_s
from simulator.policies.restriction import is_kept, solve_without_taking, without_taking
from tests.examples import examples

WORKERS = 7

RATES = {count: float(count) for count in range(1, 9)}
"""Throughput in proportion to workers."""


@st.composite
def tasks(draw: st.DrawFn, name: str, pool: str) -> TaskProblem:
    return TaskProblem(
        name=name,
        weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
        necessary=draw(st.integers(0, 2)),
        maximum=draw(st.integers(1, WORKERS)),
        current=draw(st.integers(0, 4)),
        faulted=draw(st.booleans()),
        transition_s=1.0,
        running_s=10.0,
        throughput={count: float(draw(st.integers(0, 8))) for count in range(1, WORKERS + 1)},
        required=draw(st.booleans()),
        pool=pool,
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to two pools with up to three tasks each; their present counts may exceed the workers that are left."""
    pools = {pool: draw(st.integers(0, WORKERS)) for pool in ["x", "y"][: draw(st.integers(1, 2))]}
    names = iter("abcdef")
    posed = [draw(tasks(next(names), pool)) for pool in pools for _ in range(draw(st.integers(1, 3)))]
    if len(pools) == 1:
        posed = [task.model_copy(update={"pool": ""}) for task in posed]
    return Problem(workers=sum(pools.values()), tasks=posed, pools=pools if len(pools) > 1 else {})


def room(problem: Problem) -> dict[str, int]:
    return dict(problem.pools) or {"": problem.workers}


def fits(problem: Problem, counts: dict[str, int]) -> bool:
    """Whether the counts need no more workers than each pool has."""
    return all(
        sum(counts[task.name] for task in problem.tasks if task.pool == pool) <= workers
        for pool, workers in room(problem).items()
    )


def kept(problem: Problem) -> list[TaskProblem]:
    """The tasks that must not shrink: healthy ones, in pools that have room for the present counts of all of them."""
    healthy = [task for task in problem.tasks if is_kept(task)]
    needed = {pool: sum(task.current for task in healthy if task.pool == pool) for pool in room(problem)}
    return [task for task in healthy if needed[task.pool] <= room(problem)[task.pool]]


@given(problems())
@settings(derandomize=True)
def test_no_healthy_task_shrinks_and_every_feasible_problem_is_answered(problem: Problem) -> None:
    try:
        solve_with_alternatives(problem)
    except InvalidInput:
        return
    best, others = solve_without_taking(problem)
    for solution in (best, *others):
        assert fits(problem, solution.assignment)
        assert all(solution.assignment[task.name] >= task.current for task in kept(problem))
        assert all(solution.assignment[task.name] <= max(task.maximum, 0) for task in problem.tasks)
        assert solution == evaluate(problem, solution.assignment, solution.label)
        assert solution.objective <= best.objective * (1 + 1e-12) + 1e-9


@given(problems())
@settings(derandomize=True)
def test_equals_the_free_solver_where_the_limit_does_not_bind(problem: Problem) -> None:
    try:
        free, _ = solve_with_alternatives(problem)
    except InvalidInput:
        return
    if all(free.assignment[task.name] >= task.current for task in kept(problem)):
        found, _ = solve_without_taking(problem)
        assert found.objective == pytest.approx(free.objective, rel=1e-12, abs=1e-9)


@given(problems())
@settings(max_examples=examples(60), derandomize=True)
def test_is_the_best_of_all_assignments_within_the_limit(problem: Problem) -> None:
    limited = without_taking(problem)
    choices = [range(task.maximum + 1) for task in problem.tasks]
    values = []
    for counts in itertools.product(*choices):
        assignment = dict(zip((task.name for task in problem.tasks), counts, strict=True))
        required = all(waf_flop_per_s(t, assignment[t.name]) > 0 for t in limited.tasks if t.required)
        useful = all(
            n == 0 or n == t.current or waf_flop_per_s(t, n) > 0 for t, n in zip(limited.tasks, counts, strict=True)
        )
        if required and useful and fits(problem, assignment):
            values.append(evaluate(problem, assignment, "").objective)
    assert solve_without_taking(problem)[0].objective == pytest.approx(max(values), rel=1e-12, abs=1e-9)


def test_a_task_that_lost_a_worker_pays_alone() -> None:
    """The free solver takes a worker from the light task; without taking, the heavy one makes do with what it has."""
    common: dict[str, Any] = {
        "necessary": 1,
        "maximum": 8,
        "transition_s": 0.0,
        "running_s": 100.0,
        "throughput": RATES,
    }
    heavy = TaskProblem(name="heavy", weight=4.0, current=4, faulted=True, **common)
    light = TaskProblem(name="light", weight=1.0, current=4, **common)
    problem = Problem(workers=7, tasks=[heavy, light])
    assert solve_with_alternatives(problem)[0].assignment == {"heavy": 7, "light": 0}
    assert solve_without_taking(problem)[0].assignment == {"heavy": 3, "light": 4}


def test_a_task_without_its_allotment_waits() -> None:
    common: dict[str, Any] = {
        "necessary": 4,
        "maximum": 4,
        "transition_s": 0.0,
        "running_s": 100.0,
        "throughput": RATES,
    }
    lost = TaskProblem(name="lost", weight=4.0, current=4, faulted=True, required=True, **common)
    whole = TaskProblem(name="whole", weight=1.0, current=4, **common)
    assert solve_without_taking(Problem(workers=7, tasks=[lost, whole]))[0].assignment == {"lost": 0, "whole": 4}
    assert solve_without_taking(Problem(workers=8, tasks=[lost, whole]))[0].assignment == {"lost": 4, "whole": 4}
