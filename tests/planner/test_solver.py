"""The solver against brute force; ties, alternatives, and single rules of the objective."""

from __future__ import annotations

import itertools
import random

import pytest

from shared.errors import InvalidInput
from shared.events.plans import Problem, TaskProblem
from shared.planning import solver
from shared.planning.solver import evaluate, solve, solve_with_alternatives
from shared.planning.waf import term, touches, waf_flop_per_s


def task(name: str, **fields: object) -> TaskProblem:
    base: dict[str, object] = {
        "weight": 1.0,
        "necessary": 1,
        "maximum": 100,
        "current": 0,
        "transition_s": 1.0,
        "running_s": 10.0,
        "throughput": {},
    }
    return TaskProblem.model_validate({"name": name, **base, **fields})


def small_problem(seed: int) -> Problem:
    """A problem of integers, so that sums are exact and equal objectives are seen as equal."""
    source = random.Random(seed)
    workers = source.randint(0, 8)
    names = source.sample(["a", "b", "c"], source.randint(0, 3))
    tasks = [
        task(
            name,
            weight=float(source.randint(1, 3)),
            necessary=source.randint(0, 4),
            maximum=source.randint(0, 9),
            current=source.randint(0, 6),
            faulted=source.random() < 0.5,
            transition_s=float(source.randint(0, 6)),
            running_s=float(source.randint(0, 6)),
            throughput={source.randint(0, 9): float(source.randint(0, 6)) for _ in range(source.randint(0, 6))},
            required=source.random() < 0.4,
        )
        for name in names
    ]
    return Problem(workers=workers, tasks=tasks)


def brute_force(problem: Problem) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """Every feasible assignment, best first: objective, tasks touched, workers moved, then by name."""
    tasks = sorted(problem.tasks, key=lambda t: t.name)
    found = []
    for counts in itertools.product(*(range(min(problem.workers, t.maximum) + 1) for t in tasks)):
        starved = any(t.required and not waf_flop_per_s(t, k) > 0 for t, k in zip(tasks, counts, strict=True))
        if sum(counts) > problem.workers or starved:
            continue
        value = sum(term(t, k).objective for t, k in zip(tasks, counts, strict=True))
        touched = sum(touches(t, k) for t, k in zip(tasks, counts, strict=True))
        moved = sum(abs(k - t.current) for t, k in zip(tasks, counts, strict=True))
        found.append((value, -touched, -moved, counts))
    return sorted(found, reverse=True)


def test_a_required_task_is_not_starved_by_a_heavier_one() -> None:
    table = {k: float(k) for k in range(1, 5)}
    tasks = [task("a", required=True, throughput=table), task("b", weight=9.0, throughput=table)]
    assert solve(Problem(workers=4, tasks=tasks)).assignment == {"a": 1, "b": 3}


def test_equals_brute_force_ties_included() -> None:
    feasible = 0
    for seed in range(600):
        feasible += check_against_brute_force(small_problem(seed))
    assert 200 < feasible < 600


def check_against_brute_force(problem: Problem) -> bool:
    """Return whether the problem is feasible."""
    everything = brute_force(problem)
    if not everything:
        with pytest.raises(InvalidInput, match="required"):
            solve_with_alternatives(problem)
        return False
    best, alternatives = solve_with_alternatives(problem)
    assert best.objective == everything[0][0]
    assert best == solve(problem)
    # Positive counts where F is zero are feasible, but never part of an answer.
    useful = [o for o in everything if all(_useful(t, k) for t, k in zip(_sorted(problem), o[3], strict=True))]
    chosen = tuple(best.assignment[t.name] for t in _sorted(problem))
    assert chosen == useful[0][3]
    second = next((a for a in alternatives if a.label == "second-best"), None)
    assert (second is not None) == (len(useful) > 1)
    if second is not None:
        assert tuple(second.assignment[t.name] for t in _sorted(problem)) == useful[1][3]
    for alternative in alternatives:
        assert sum(alternative.assignment.values()) <= problem.workers
        assert alternative.objective <= best.objective
        assert alternative == evaluate(problem, alternative.assignment, alternative.label)
        assert alternative.assignment != best.assignment
    return True


def _sorted(problem: Problem) -> list[TaskProblem]:
    return sorted(problem.tasks, key=lambda t: t.name)


def _useful(item: TaskProblem, workers: int) -> bool:
    return (workers in (0, item.current) and not item.required) or waf_flop_per_s(item, workers) > 0


def test_useless_workers_are_left_to_another_task() -> None:
    """T is not monotone: a takes 2, since 3 are no better, and b makes use of the rest."""
    flat = task("a", throughput={1: 10.0, 2: 20.0, 3: 19.0}, current=3, running_s=100.0)
    steep = task("b", throughput={1: 1.0, 2: 2.0})
    assert solve(Problem(workers=4, tasks=[flat, steep])).assignment == {"a": 2, "b": 2}


def test_a_gain_smaller_than_the_transition_changes_nothing() -> None:
    slow = task("a", throughput={2: 20.0, 3: 21.0}, current=2, running_s=10.0, transition_s=1.0)
    assert solve(Problem(workers=3, tasks=[slow])).assignment == {"a": 2}
    longer = slow.model_copy(update={"running_s": 30.0})
    assert solve(Problem(workers=3, tasks=[longer])).assignment == {"a": 3}


def test_below_necessary_is_worth_nothing() -> None:
    big = task("a", necessary=4, weight=9.0, throughput={k: 10.0 * k for k in range(1, 5)})
    small = task("b", throughput={1: 1.0})
    assert solve(Problem(workers=3, tasks=[big, small])).assignment == {"a": 0, "b": 1}


def test_the_terms_are_those_of_the_formula() -> None:
    item = task("a", weight=2.0, current=3, transition_s=5.0, running_s=7.0, throughput={2: 10.0, 3: 14.0})
    got = term(item, 2)
    assert (got.waf_flop_per_s, got.reward, got.penalty, got.objective) == (20.0, 140.0, 140.0, 0.0)
    assert term(item, 3).penalty == 0.0
    assert term(item.model_copy(update={"faulted": True}), 3).penalty == 140.0


def test_newcomers_are_paid_for_above_the_workers_that_stay() -> None:
    item = task("a", current=3, faulted=True, staying=2, transition_s=5.0, newcomers_s=2.0, throughput={3: 10.0})
    penalties = [term(item.model_copy(update={"transition_to_s": {4: 1.0}}), k).penalty for k in (0, 1, 2, 3, 4)]
    assert penalties == [50.0, 50.0, 50.0, 70.0, 10.0]
    assert term(item.model_copy(update={"faulted": False}), 3).penalty == 0.0


def test_growth_that_does_not_pay_for_its_newcomers_is_left() -> None:
    grows = task("a", throughput={1: 1.0, 2: 2.0, 3: 3.0}, current=2, staying=2, running_s=10.0, newcomers_s=5.0)
    assert solve(Problem(workers=3, tasks=[grows])).assignment == {"a": 2}
    cheap = grows.model_copy(update={"newcomers_s": 3.0})
    assert solve(Problem(workers=3, tasks=[cheap])).assignment == {"a": 3}


def test_only_faulted_shrinks_pins_the_healthy() -> None:
    table = {k: float(k) for k in range(1, 9)}
    healthy = task("a", weight=1.0, current=4, throughput=table, running_s=100.0)
    faulted = task("b", weight=5.0, current=4, faulted=True, throughput=table, running_s=100.0)
    best, alternatives = solve_with_alternatives(Problem(workers=6, tasks=[healthy, faulted]))
    naive = next(a for a in alternatives if a.label == "only-faulted-shrinks")
    assert naive.assignment == {"a": 4, "b": 2}
    assert best.assignment == {"a": 0, "b": 6}
    assert all(a.label != "keep" for a in alternatives)


@pytest.mark.timeout(300)  # compiles
def test_medium_problem_equals_the_plain_dynamic_program() -> None:
    """128 workers, 6 tasks: the same objective as the paper's recursion written plainly."""
    tasks = [
        task(
            f"t{i}",
            weight=1.0 + 0.3 * i,
            necessary=4 * i,
            maximum=128,
            current=20,
            faulted=i == 2,
            throughput={k: 1e12 * (64 // -(-64 // k)) ** 0.9 for k in range(1, 65)},
            running_s=5000.0,
        )
        for i in range(6)
    ]
    best = [0.0] * 129
    for item in reversed(tasks):
        values = [term(item, k).objective for k in range(129)]
        best = [max(values[k] + best[j - k] for k in range(j + 1)) for j in range(129)]
    assert solve(Problem(workers=128, tasks=tasks)).objective == best[128]


def test_without_a_task_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node of a fleet that joins has a plan, also before there is a task."""
    monkeypatch.setattr(solver, "_optimum", lambda *_, **__: pytest.fail("the solver searches"))
    best, others = solve_with_alternatives(Problem(workers=64, tasks=[]))
    assert (best.assignment, best.objective, best.terms, others) == ({}, 0.0, [], [])
