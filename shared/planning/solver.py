"""Exact choice of worker counts: the multiple-choice knapsack problem of the Unicron paper (section 5.2).

    maximise  sum of G(t, x_t)   over useful counts x_t with  sum of x_t <= workers

T is zero outside its table, so a task's useful counts are those of its table where F is positive, 0 and its current
count; a task that is ``required`` has only the first. The paper's dynamic program takes O(m n^2); this takes the
shortcut of Lagrange:

1. A count that is no better than a smaller one of its task is dropped (with the penalty-free current count among them).
2. At any price for a worker, each task has a best count; G summed over those, and the price of all workers, bound every
   assignment (``kernels.losses``). The price is that of the concave envelopes' relaxation, where the bound is least.
3. Each count loses a known amount against its task's best at that price, and an assignment is worth the bound less its
   losses and the price of idle workers. So those within a budget of losses are built task by task from few counts and
   few sums (``kernels.search``). If the best of them is worth at least bound - budget, nothing else can be better;
   otherwise the budget grows, up to what a greedy assignment loses.

**Arithmetic.** G is computed in float64 by the formulas of ``waf.py`` and then taken as a whole number of units, a
power of two such that all G together stay below 2**58. From there on all is integers: exact, in any order, on any
machine. What rounds away is below the last bit of the float64 sum. The objective that is returned is the
float64 sum of the terms, from the last name to the first.

**Ties** break by fewest tasks touched, then fewest workers moved, then by name: the earlier name gets more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shared.errors import InvalidInput
from shared.planning.instance import Inputs, Instance
from shared.planning.waf import term, waf_flop_per_s
from shared.plans import Problem, Solution, TaskProblem, Term


class Proof(NamedTuple):
    """Why the best assignment is the best. Worths in weighted FLOP.

    ``relaxation``: bound of the relaxation. ``price``: of a worker. ``bound``: no assignment is worth more; all worth
    more than ``relaxation - budget`` were looked at, and this is the best. ``states``: partial assignments kept.
    """

    bound: float
    relaxation: float
    price: float
    budget: float
    states: int


def solve(problem: Problem) -> Solution:
    """Return the assignment of greatest objective, labelled ``best``.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    return solve_with_proof(problem)[0]


def solve_with_proof(problem: Problem) -> tuple[Solution, Proof]:
    """Return the best assignment and what proves that it is.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    instance = Instance.of(Inputs.of(problem))
    counts, _, proof = _optimum(instance, alternatives=False)
    solution = _solution(instance.tasks, counts, "best")
    bound, price, worth, budget, states = (int(value) for value in proof)
    # The search went through every assignment worth more than bound - budget, so the rest is worth no more than that.
    gap = max(worth, bound - budget) - worth
    unit = 2.0**instance.exponent
    return solution, Proof(solution.objective + gap * unit, bound * unit, price * unit, budget * unit, states)


class Counts(NamedTuple):
    """The best and the second best counts of all tasks, by name. ``second``: None if there is no other assignment."""

    best: list[int]
    second: list[int] | None


def best_counts(inputs: Inputs) -> Counts:
    """Return what takes time to find: all else about the answer follows from it.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    best, second, _ = _optimum(Instance.of(inputs), alternatives=True)
    return Counts(best, second)


def solve_with_alternatives(problem: Problem) -> tuple[Solution, list[Solution]]:
    """Return the best assignment and those it was preferred to.

    ``second-best``: the best of all others. ``keep``: every task keeps its count. ``only-faulted-shrinks``: healthy
    tasks keep theirs, faulted ones share what is left. ``equal-split``: the same number for each, rounded down to a
    useful count. An alternative that is infeasible, or is the best itself, is left out.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    inputs = Inputs.of(problem)
    return answer(inputs, best_counts(inputs))


def answer(inputs: Inputs, found: Counts) -> tuple[Solution, list[Solution]]:
    """Return the solutions that follow from the counts found for these inputs; see ``solve_with_alternatives``."""
    instance = Instance.of(inputs)
    tasks = instance.tasks
    candidates = {
        "second-best": found.second,
        "keep": _fitting([task.current for task in tasks], tasks, inputs.workers),
        "only-faulted-shrinks": _only_faulted(instance),
        "equal-split": _equal_split(instance),
    }
    return _solution(tasks, found.best, "best"), [
        _solution(tasks, counts, label)
        for label, counts in candidates.items()
        if counts is not None and counts != found.best
    ]


def evaluate(problem: Problem, assignment: Mapping[str, int], label: str) -> Solution:
    """Return the value of a given assignment; a task that is absent gets 0."""
    tasks = sorted(problem.tasks, key=lambda task: task.name)
    return _solution(tasks, [assignment.get(task.name, 0) for task in tasks], label)


def _optimum(instance: Instance, *, alternatives: bool) -> tuple[list[int], list[int] | None, Sequence[int]]:
    """Return the best counts, the second best if asked for and there are any, and the proof."""
    feasible, best, another, second, proof = instance.kernels.optimise(
        instance.starts,
        instance.counts,
        instance.worth,
        instance.touched,
        instance.moved,
        instance.workers,
        alternatives,
    )
    if not feasible:
        raise InvalidInput(f"the required tasks need more than {instance.workers} workers")
    return instance.chosen(best), instance.chosen(second) if another else None, proof


def _fitting(counts: list[int], tasks: Sequence[TaskProblem], workers: int) -> list[int] | None:
    """Return the counts if they are feasible."""
    allowed = all(
        k <= task.maximum and not (task.required and waf_flop_per_s(task, k) <= 0.0)
        for k, task in zip(counts, tasks, strict=True)
    )
    return counts if allowed and sum(counts) <= workers else None


def _equal_split(instance: Instance) -> list[int] | None:
    counts = []
    for t in range(len(instance.tasks)):
        useful = instance.useful(t)
        within = int(np.searchsorted(useful, instance.workers // len(instance.tasks), side="right"))
        if within == 0:
            return None
        counts.append(int(useful[within - 1]))
    return counts


def _only_faulted(instance: Instance) -> list[int] | None:
    """Return the naive answer: healthy tasks keep their counts, faulted ones share the rest; None if it cannot be."""
    tasks = instance.tasks
    healthy = [task for task in tasks if not task.faulted]
    if len(healthy) == len(tasks) or _fitting([t.current for t in healthy], healthy, instance.workers) is None:
        return None
    allowed = []
    for t, task in enumerate(tasks):
        useful = instance.useful(t)
        allowed.append(useful[useful <= task.current] if task.faulted else np.array([task.current], np.int64))
    try:
        return _optimum(instance.only(allowed), alternatives=False)[0]
    except InvalidInput:
        return None


def _solution(tasks: Sequence[TaskProblem], counts: Sequence[int], label: str) -> Solution:
    terms: list[Term] = [term(task, k) for task, k in zip(tasks, counts, strict=True)]
    objective = 0.0
    for item in reversed(terms):
        objective = item.objective + objective
    return Solution(
        label=label,
        assignment={task.name: k for task, k in zip(tasks, counts, strict=True)},
        objective=objective,
        terms=terms,
    )
