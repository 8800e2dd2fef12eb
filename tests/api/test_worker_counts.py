"""Why tasks have as many workers as a plan gives them, and not more or fewer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.postmortem import words
from services.api.postmortem.counts import count_reasons, unused
from services.api.postmortem.decided import replanned
from shared.events.plans import Problem, TaskProblem
from shared.planning.solver import solve_with_alternatives


def task(name: str, rates: dict[int, float], **changes: Any) -> TaskProblem:
    posed = {
        "name": name,
        "weight": 1.0,
        "necessary": 1,
        "maximum": 8,
        "current": 4,
        "transition_s": 10.0,
        "running_s": 1000.0,
        "throughput": rates,
    }
    return TaskProblem(**{**posed, **changes})


LINEAR = {x: 1e12 * x for x in range(1, 9)}


def test_a_task_at_its_maximum_says_so() -> None:
    problem = Problem(workers=8, tasks=[task("a", LINEAR, maximum=4)])
    best, _ = solve_with_alternatives(problem)
    (reason,) = count_reasons(problem, best)
    assert (reason.workers, reason.more.workers) == (4, None)
    assert "at most 4" in reason.more.reason
    assert unused(problem, best.assignment) == 4


def test_workers_that_no_layout_can_use_are_idle_for_that_reason() -> None:
    problem = Problem(workers=8, tasks=[task("a", {4: 4e12})])
    best, _ = solve_with_alternatives(problem)
    (reason,) = count_reasons(problem, best)
    assert reason.more.workers is None
    assert "no layout" in reason.more.reason


def test_free_workers_stay_free_where_the_change_costs_more_than_it_brings() -> None:
    problem = Problem(workers=5, tasks=[task("a", {4: 4e12, 5: 4.01e12}, staying=4, newcomers_s=500.0)])
    best, _ = solve_with_alternatives(problem)
    (reason,) = count_reasons(problem, best)
    assert (reason.workers, reason.more.workers) == (4, 5)
    assert reason.more.less_flop is not None
    assert reason.more.less_flop > 0.0
    assert "1 worker is free" in reason.more.reason


def test_a_task_that_would_have_to_take_from_another_names_it_and_the_loss() -> None:
    heavy, light = task("heavy", LINEAR, weight=2.0), task("light", LINEAR, weight=1.0)
    problem = Problem(workers=8, tasks=[heavy.model_copy(update={"maximum": 5}), light])
    best, _ = solve_with_alternatives(problem)
    assert best.assignment["heavy"] > 0
    reasons = {reason.task: reason for reason in count_reasons(problem, best)}
    assert "heavy would have to go down to" in reasons["light"].more.reason


@given(
    st.lists(st.dictionaries(st.integers(1, 8), st.floats(1e10, 1e14), min_size=1), min_size=1, max_size=3),
    st.integers(1, 10),
    st.data(),
)
def test_no_count_within_reach_is_better_than_the_chosen_one(
    rates: list[dict[int, float]], workers: int, data: st.DataObject
) -> None:
    """Of the free workers: a larger count that needs no other task's worker is worth no more, by the solver's proof."""
    tasks = [
        task(f"t{i}", each, current=data.draw(st.integers(0, 8)), weight=data.draw(st.floats(0.1, 3.0)))
        for i, each in enumerate(rates)
    ]
    problem = Problem(workers=workers, tasks=tasks)
    best, _ = solve_with_alternatives(problem)
    free = unused(problem, best.assignment)
    for reason in count_reasons(problem, best):
        more = reason.more
        if more.workers is not None and more.workers - reason.workers <= free:
            assert more.less_flop is not None
            assert more.less_flop >= -1e-9 * abs(best.objective)
            assert "more than it brings" in more.reason


def test_replanning_weighs_the_survivors_against_the_worker_s_return() -> None:
    problem = Problem(workers=8, tasks=[task("a", LINEAR, staying=4, newcomers_s=20.0)])
    model = replanned("p1", problem, {"a": 4}, "a", 4, 1)
    assert model is not None
    assert model.shrunk_workers == 3
    assert model.restored_flop == pytest.approx(4e12 * (1000.0 - 30.0))
    assert model.shrunk_flop == pytest.approx(3e12 * 1000.0 - 4e12 * 10.0)
    assert replanned("p1", problem, {"a": 4}, "b", 4, 1) is None


def test_replanning_gives_what_the_solver_finds_without_the_worker() -> None:
    other = task("b", LINEAR, current=4, maximum=4)
    problem = Problem(workers=8, tasks=[task("a", LINEAR, maximum=4, weight=3.0), other])
    model = replanned("p1", problem, {"a": 4, "b": 4}, "a", 4, 1)
    assert model is not None
    assert model.assignment == {"a": 4, "b": 3}
    assert model.more.reason == "its specification allows at most 4"
    assert model.kept_flop == pytest.approx(12e12 * 990.0 + 4e12 * 1000.0)
    assert words.replanned(model).startswith("a 4, b 3; all tasks together worth")


def test_free_workers_that_would_help_are_given_at_the_next_trigger() -> None:
    problem = Problem(workers=8, tasks=[task("a", LINEAR)])
    free = replanned("p1", problem, {"a": 4}, "a", 4, 1)
    assert free is not None
    assert free.assignment == {"a": 7}
    assert "the solver, which gives them, is asked at the next trigger" in free.more.reason


def test_required_tasks_for_which_too_little_is_left_are_not_replanned() -> None:
    problem = Problem(workers=4, tasks=[task("a", {4: 4e12}, necessary=4, required=True)])
    model = replanned("p1", problem, {"a": 4}, "a", 4, 1)
    assert model is not None
    assert model.assignment == {}
    assert "too few" in words.replanned(model)
    assert "no number of workers that is left is useful" in words.fewer(model)
