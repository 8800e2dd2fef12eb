"""Prices in the objective: workers that cost more than they bring stay unused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.problem.problem import worker_cost_flop_per_s
from shared.events.plans import Problem, TaskProblem
from shared.planning.solver import evaluate, solve
from tests.planner.kit import World

ENDLESS = 10**9


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    workers = draw(st.integers(1, 8))
    tasks = []
    for i in range(draw(st.integers(1, 3))):
        rates = draw(st.lists(st.integers(1, 20), min_size=1, max_size=workers))
        tasks.append(
            TaskProblem(
                name=f"t{i}",
                weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
                necessary=draw(st.integers(0, 2)),
                maximum=workers,
                current=draw(st.integers(0, 2)),
                transition_s=draw(st.sampled_from([0.0, 10.0])),
                staying=2,
                running_s=100.0,
                throughput={count: float(sum(rates[:count])) for count in range(1, len(rates) + 1)},
                worker_cost_flop_per_s=draw(st.sampled_from([0.0, 2.0, 7.5])),
            )
        )
    return Problem(workers=workers, tasks=tasks)


@given(problems())
def test_the_best_counts_are_the_best_of_all(problem: Problem) -> None:
    names = [task.name for task in problem.tasks]
    allowed = [sorted({0, t.current, *t.throughput}) for t in problem.tasks]
    values = [
        evaluate(problem, dict(zip(names, counts, strict=True)), "").objective
        for counts in product(*allowed)
        if sum(counts) <= problem.workers
    ]
    assert solve(problem).objective == pytest.approx(max(values), rel=1e-12, abs=1e-9)


def world(**parameters: float) -> World:
    w = World(**dict[str, Any](parameters))
    for node in ("n0", "n1", "n2"):
        w.join(node, workers=4)
    return w


def test_workers_stay_unused_that_cost_more_than_they_bring() -> None:
    # The first workers of a task achieve 1.6 GFLOP/s each, the last of 12 far less.
    def workers(value_per_eflop: float) -> int:
        w = world(price_per_worker_hour=3.6, value_per_eflop=value_per_eflop)
        w.complete(w.submit("a", steps=ENDLESS, workers={"min": 1}))
        return len(w.task().members)

    assert workers(0.0) == 12  # prices decide nothing
    assert workers(1e9) == 12  # a worker costs what 1 MFLOP/s are worth
    assert 1 <= workers(7e5) < 12  # 1.4 GFLOP/s
    assert workers(1e4) == 1  # more than any worker achieves: a task that is admitted keeps its minimum


def test_each_kind_has_its_price() -> None:
    w = World(price_per_worker_hour=1.0, prices={"a100-80": 7.2}, value_per_eflop=1e6)
    assert worker_cost_flop_per_s(w.state, "a100-80") == pytest.approx(7.2 / 3600 * 1e18 / 1e6)
    assert worker_cost_flop_per_s(w.state, "cpu") == pytest.approx(1.0 / 3600 * 1e18 / 1e6)


def test_without_a_value_problems_are_as_they_were() -> None:
    w = world()
    plan = w.submit("a", steps=ENDLESS)
    assert "worker_cost" not in plan.canonical()
