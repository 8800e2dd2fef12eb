"""The solver against enumeration, the paper's dynamic program and an integer program."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from shared.errors import InvalidInput
from shared.events.plans import Problem, TaskProblem
from shared.planning import compiled
from shared.planning.instance import Inputs, Instance
from shared.planning.solver import solve, solve_with_alternatives, solve_with_proof
from shared.planning.waf import term, touches, waf_flop_per_s

ROUNDING = 1e-13
"""Sums of up to some hundred float64 in different orders differ by less, relative to the sum of their amounts."""

pytestmark = pytest.mark.timeout(300)  # once in a while, that is how long compiling takes on a busy machine

SCALES = (1e-12, 1e-3, 1.0, 1e15, 1e21)
SHAPES = ("any", "plateau", "linear", "concave", "steps", "noise")


def random_table(source: random.Random, workers: int) -> dict[int, float]:
    """A throughput table: concave, linear, with plateaus, not monotone, with holes, or anything."""
    shape, scale = source.choice(SHAPES), source.choice(SCALES)
    counts = source.sample(range(workers + 3), source.randint(0, workers + 3))
    match shape:
        case "plateau":
            return {k: scale * (k // 3) for k in counts}
        case "linear":
            return {k: scale * k for k in counts}
        case "concave":
            return {k: scale * k / (1.0 + 0.1 * k) for k in counts}
        case "steps":
            return {k: scale * 12 / (-(-12 // k)) if k else 0.0 for k in counts}
        case "noise":
            return {k: scale * source.choice([0.0, source.random(), 1.0]) for k in counts}
        case _:
            return {k: scale * source.randint(0, 3) for k in counts}


def small_problem(seed: int) -> Problem:
    """A problem whose assignments can be enumerated."""
    source = random.Random(seed)
    workers = source.randint(0, 9)
    alike = random_table(source, workers) if source.random() < 0.5 else None
    tasks = [
        TaskProblem(
            name=name,
            weight=source.choice([1e-6, 0.5, 1.0, 1.0, 2.0, 1e6]),
            necessary=source.randint(0, 4),
            maximum=source.randint(0, workers + 2),
            current=source.randint(0, 6),
            faulted=source.random() < 0.5,
            transition_s=source.choice([0.0, 1.0, 60.0, 1e4]),
            transition_to_s={source.randint(0, 9): source.uniform(0, 100) for _ in range(source.randint(0, 2))},
            staying=source.randint(0, 6),
            newcomers_s=source.choice([0.0, 0.0, 0.5, 30.0, 1e4]),
            running_s=source.choice([0.0, 10.0, 1e3, 86_400.0]),
            throughput=alike if alike is not None else random_table(source, workers),
            required=source.random() < 0.25,
        )
        for name in ["a", "b", "c", "d"][: source.randint(0, 4)]
    ]
    return Problem(workers=workers, tasks=tasks)


def assignments(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every feasible assignment of useful counts, written from the definition."""
    useful = [
        [
            k
            for k in range(min(problem.workers, t.maximum) + 1)
            if waf_flop_per_s(t, k) > 0 or (not t.required and k in (0, t.current))
        ]
        for t in problem.tasks
    ]
    return (counts for counts in itertools.product(*useful) if sum(counts) <= problem.workers)


def in_units(problem: Problem) -> dict[tuple[str, int], int]:
    """G of every task and count in the whole units of the solver."""
    instance = Instance.of(Inputs.of(problem))
    choices = instance.choices
    return {
        (task.name, int(choices.counts[j])): int(choices.value[j])
        for t, task in enumerate(instance.tasks)
        for j in range(choices.starts[t], choices.starts[t + 1])
    }


def test_equals_enumeration() -> None:
    """The best and the second best, ties included, and no float sum of any other assignment is greater.

    Seeds in place of hypothesis, which takes four times as long to draw these problems as the solver and this check.
    """
    for seed in range(1500):
        check_against_enumeration(small_problem(seed))


def check_against_enumeration(problem: Problem) -> None:
    everything = list(assignments(problem))
    if not everything:
        with pytest.raises(InvalidInput, match="required"):
            solve(problem)
        return
    units = in_units(problem)

    def rank(counts: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        pairs = list(zip(problem.tasks, counts, strict=True))
        return (
            sum(units[t.name, k] for t, k in pairs),
            -sum(touches(t, k) for t, k in pairs),
            -sum(abs(k - t.current) for t, k in pairs),
            counts,
        )

    ranked = sorted(everything, key=rank, reverse=True)
    best, alternatives = solve_with_alternatives(problem)
    assert tuple(best.assignment[t.name] for t in problem.tasks) == ranked[0]
    second = [tuple(s.assignment[t.name] for t in problem.tasks) for s in alternatives if s.label == "second-best"]
    assert second == ranked[1:2]

    exact = {(t.name, k): Fraction(term(t, k).objective) for t in problem.tasks for k in range(problem.workers + 1)}
    greatest = max(sum(exact[t.name, k] for t, k in zip(problem.tasks, c, strict=True)) for c in everything)
    size = sum(
        max((abs(exact[t.name, k]) for k in range(problem.workers + 1)), default=Fraction(0)) for t in problem.tasks
    )
    assert abs(Fraction(best.objective) - greatest) <= Fraction(ROUNDING) * size


def random_problem(
    seed: int, workers: int, tasks: int, replicas: tuple[int, ...], *, alike: bool = False, jagged: bool = False
) -> Problem:
    """Tasks with counts of several layouts; some counts no better than smaller ones; one task faulted."""
    source = random.Random(seed)
    items = []
    for i in range(tasks):
        replica = source.choice(replicas)
        micro_batches = source.choice([96, 128, 192, 256, 512])
        peak = source.uniform(5e13, 1.5e14) if not alike else 1e14
        table = {
            replica * d: peak * replica * micro_batches / (-(-micro_batches // d) + 0.1 * (d - 1) / d)
            for d in range(1, min(micro_batches, workers // replica) + 1)
            if not jagged or source.random() < 0.4
        }
        items.append(
            TaskProblem(
                name=f"t{i:03d}",
                weight=1.0 if alike else source.choice([0.5, 1.0, 1.0, 2.0]) * source.uniform(0.9, 1.1),
                necessary=replica,
                maximum=workers,
                current=int(workers / tasks * source.uniform(0.7, 1.2)) // replica * replica,
                faulted=i == 0,
                transition_s=60.0 if alike else source.uniform(5, 60),
                staying=int(workers / tasks * 0.8),
                newcomers_s=0.0 if alike else source.uniform(0, 60),
                running_s=86_400.0 if alike else source.uniform(2e4, 1e5),
                throughput=table,
            )
        )
    return Problem(workers=workers, tasks=items)


def plain_dynamic_program(problem: Problem) -> float:
    """The paper's recursion, S(i, j) = max over k of S(i-1, j-k) + G(t_i, k), all counts, in float64."""
    best = np.zeros(problem.workers + 1)
    for task in reversed(sorted(problem.tasks, key=lambda t: t.name)):
        after, best = best, np.full(problem.workers + 1, -np.inf)
        for k in range(min(problem.workers, task.maximum) + 1):
            reached = term(task, k).objective + after[: problem.workers + 1 - k]
            np.maximum(best[k:], reached, out=best[k:])
    return float(best[-1])


SHAPES_OF_ALL_COUNTS: dict[str, Callable[[int], float]] = {
    "linear": lambda k: 1.0 * k,
    "concave": lambda k: k / (1.0 + k / 16.0),
    "plateaus": lambda k: k // 6 * 6.0,
    "constant": lambda k: 1.0,
}


def same(value: float, other: float) -> bool:
    return abs(value - other) <= ROUNDING * max(abs(value), abs(other))


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize(("workers", "tasks"), [(96, 5), (300, 12), (600, 20)])
def test_equals_the_papers_dynamic_program(workers: int, tasks: int, alike: bool, jagged: bool) -> None:
    for seed in range(2):
        problem = random_problem(seed, workers, tasks, (1, 2, 3, 8), alike=alike, jagged=jagged)
        solution, proof = solve_with_proof(problem)
        assert same(solution.objective, plain_dynamic_program(problem))
        assert proof.bound == solution.objective
        assert proof.relaxation >= solution.objective * (1 - ROUNDING)


@pytest.mark.parametrize("shape", SHAPES_OF_ALL_COUNTS)
@pytest.mark.parametrize("required", [False, True])
def test_equals_the_dynamic_program_where_every_count_is_useful_and_all_tie(shape: str, required: bool) -> None:
    workers, tasks = 240, 12
    table = {k: 1e14 * SHAPES_OF_ALL_COUNTS[shape](k) for k in range(1, workers + 1)}
    problem = Problem(
        workers=workers - 8,
        tasks=[
            TaskProblem(
                name=f"t{i:02d}",
                weight=1.0,
                necessary=1,
                maximum=workers,
                current=workers // tasks,
                faulted=i == 0,
                transition_s=60.0,
                running_s=86_400.0,
                throughput=table,
                required=required,
            )
            for i in range(tasks)
        ],
    )
    solution, proof = solve_with_proof(problem)
    best, alternatives = solve_with_alternatives(problem)
    assert best == solution
    assert proof.bound == solution.objective
    if not required:  # the program knows no required tasks
        assert same(solution.objective, plain_dynamic_program(problem))
    if shape == "linear":  # all assignments tie but for what they touch: nothing but the faulted one
        assert [t.name for t in problem.tasks if solution.assignment[t.name] != t.current] == ["t00"]
    assert all(s.objective <= best.objective * (1 + ROUNDING) for s in alternatives)


@pytest.mark.parametrize(("workers", "tasks", "seed"), [(2048, 24, 1), (2048, 24, 2), (4096, 48, 3)])
def test_equals_an_integer_program(workers: int, tasks: int, seed: int) -> None:
    """HiGHS on the plain formulation: one binary variable for each task and count."""
    optimize = pytest.importorskip("scipy.optimize")
    sparse = pytest.importorskip("scipy.sparse")
    problem = random_problem(seed, workers, tasks, (8, 16, 24, 32), jagged=True)
    pairs = [
        (i, k)
        for i, task in enumerate(problem.tasks)
        for k in sorted({0, *task.throughput, task.current})
        if k <= min(workers, task.maximum)
    ]
    unit = max(abs(term(problem.tasks[i], k).objective) for i, k in pairs)
    values = np.array([term(problem.tasks[i], k).objective / unit for i, k in pairs])
    rows = sparse.coo_array((np.ones(len(pairs)), ([i for i, _ in pairs], range(len(pairs)))))
    result = optimize.milp(
        -values,
        constraints=[
            optimize.LinearConstraint(rows.tocsr(), 1, 1),
            optimize.LinearConstraint(np.array([[k for _, k in pairs]]), 0, workers),
        ],
        integrality=np.ones(len(pairs)),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 1e-12},
    )
    assert result.status == 0
    picked = [pairs[i] for i in np.flatnonzero(result.x > 0.5)]
    assert sum(k for _, k in picked) <= workers
    value = sum(term(problem.tasks[i], k).objective for i, k in picked)
    solution = solve(problem)
    # HiGHS is exact within its tolerance only; its assignment, valued exactly, must not beat ours.
    assert value <= solution.objective * (1 + ROUNDING)
    assert solution.objective <= value * (1 + 1e-7)


def test_plain_and_compiled_kernels_agree() -> None:
    """Every array of the reduction and both answers."""
    plain, quick = compiled.plain, compiled.compiled()
    assert plain.optimise is not quick.optimise
    for seed in range(3):
        instance = Instance.of(Inputs.of(random_problem(seed, 60, 4, (1, 2, 3), jagged=seed == 1)))
        ours, theirs = (kernels.optimise(instance.choices, 60, True) for kernels in (plain, quick))
        assert ours.proof == theirs.proof
        for mine, other in zip(ours, theirs, strict=True):
            assert np.array_equal(mine, other)


def test_values_are_those_of_the_formula() -> None:
    """The compiled float64 arithmetic is that of the terms, to the bit."""
    problem = random_problem(5, 4096, 8, (1, 3, 8))
    instance = Instance.of(Inputs.of(problem))
    choices = instance.choices
    scale = Fraction(2) ** -instance.exponent
    for t, task in enumerate(instance.tasks):
        for j in range(choices.starts[t], choices.starts[t + 1]):
            exact = Fraction(term(task, int(choices.counts[j])).objective) * scale
            assert int(choices.value[j]) == round(exact)
            assert (int(choices.touched[j]), int(choices.moved[j])) == (
                int(touches(task, int(choices.counts[j]))),
                abs(int(choices.counts[j]) - task.current),
            )


def test_the_order_of_the_tasks_does_not_matter() -> None:
    problem = random_problem(7, 500, 10, (1, 2, 4), alike=True)
    shuffled = Problem(workers=500, tasks=list(reversed(problem.tasks)))
    assert solve_with_alternatives(shuffled) == solve_with_alternatives(problem)


def test_an_objective_beyond_float64_is_refused() -> None:
    huge = random_problem(1, 16, 2, (1,)).tasks[0].model_copy(update={"throughput": {1: 1e300}, "running_s": 1e12})
    with pytest.raises(InvalidInput, match="64-bit float"):
        solve(Problem(workers=16, tasks=[huge]))
