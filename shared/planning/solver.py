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

**Pools.** A task runs on workers of one kind. Where there are several kinds, each is a problem of its own, solved
exactly (``pools_of``); the answer to the whole is made of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shared.errors import InvalidInput
from shared.planning.instance import Inputs, Instance
from shared.planning.waf import term, touches, waf_flop_per_s
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

    Of several pools, the price is that of the dearest worker, and all else the sum.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    counts: dict[str, int] = {}
    proofs = []
    for pool in pools_of(problem):
        instance = Instance.of(Inputs.of(pool))
        found, _, numbers = _optimum(instance, alternatives=False)
        counts |= dict(zip((task.name for task in instance.tasks), found, strict=True))
        bound, price, worth, budget, states = (int(value) for value in numbers)
        # The search went through every assignment worth more than bound - budget: the rest is worth no more than that.
        gap = max(worth, bound - budget) - worth
        unit = 2.0**instance.exponent
        proofs.append(Proof(gap * unit, bound * unit, price * unit, budget * unit, states))
    solution = evaluate(problem, counts, "best")
    return solution, Proof(
        bound=solution.objective + sum(proof.bound for proof in proofs),
        relaxation=sum(proof.relaxation for proof in proofs),
        price=max(proof.price for proof in proofs),
        budget=sum(proof.budget for proof in proofs),
        states=sum(proof.states for proof in proofs),
    )


class Counts(NamedTuple):
    """The counts of a pool's tasks, by name, in the best assignment and in those it was preferred to.

    See ``solve_with_alternatives``; None: there is no such assignment.
    """

    best: list[int]
    second: list[int] | None
    keep: list[int] | None
    only_faulted: list[int] | None
    equal_split: list[int] | None


def pools_of(problem: Problem) -> list[Problem]:
    """Return the problem of each pool that has tasks, by the pools' names; the problem itself if it has no pools.

    Raises:
        InvalidInput: a task names no pool, or the pools' workers do not add up.
    """
    if not problem.pools:
        return [problem]
    if sum(problem.pools.values()) != problem.workers:
        raise InvalidInput(f"pools: they have {sum(problem.pools.values())} workers, not {problem.workers}")
    tasks: dict[str, list[TaskProblem]] = {name: [] for name in sorted(problem.pools)}
    for task in problem.tasks:
        if task.pool not in tasks:
            raise InvalidInput(f"task {task.name}: there is no pool {task.pool!r}")
        tasks[task.pool].append(task)
    one = problem.model_copy(update={"pools": {}, "tasks": []})
    parts = [
        one.model_copy(update={"workers": problem.pools[name], "tasks": having})
        for name, having in tasks.items()
        if having
    ]
    return parts or [one]


def best_counts(inputs: Inputs) -> Counts:
    """Return what takes time to find about a single pool: the solutions follow from it (``answer``).

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    instance = Instance.of(inputs)
    best, second, _ = _optimum(instance, alternatives=True)
    tasks = instance.tasks
    keep = _fitting([task.current for task in tasks], tasks, inputs.workers)
    return Counts(best, second, keep, _only_faulted(inputs, instance, keep), _equal_split(instance))


def solve_with_alternatives(problem: Problem) -> tuple[Solution, list[Solution]]:
    """Return the best assignment and those it was preferred to.

    ``second-best``: the best of all others. ``keep``: every task keeps its count. ``only-faulted-shrinks``: healthy
    tasks keep theirs, faulted ones share what is left. ``equal-split``: the same number for each task of a pool,
    rounded down to a useful count. An alternative that is infeasible, or is the best itself, is left out.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    pools = [Inputs.of(pool) for pool in pools_of(problem)]
    return answer([(inputs, best_counts(inputs)) for inputs in pools])


def answer(pools: Sequence[tuple[Inputs, Counts]]) -> tuple[Solution, list[Solution]]:
    """Return the solutions that follow from the counts found for each pool; see ``solve_with_alternatives``."""
    everyone = [(task, pool, i) for pool, (inputs, _) in enumerate(pools) for i, task in enumerate(inputs.tasks)]
    everyone.sort(key=lambda item: item[0].name)
    tasks = [task for task, _, _ in everyone]

    def together(parts: Sequence[list[int] | None]) -> list[int] | None:
        known = [part for part in parts if part is not None]
        return [known[pool][i] for _, pool, i in everyone] if len(known) == len(parts) else None

    bests = [found.best for _, found in pools]
    best = [bests[pool][i] for _, pool, i in everyone]
    seconds = [
        counts
        for pool, (_, found) in enumerate(pools)
        if (counts := together([*bests[:pool], found.second, *bests[pool + 1 :]])) is not None
    ]
    faulted = any(task.faulted for task in tasks)
    candidates = {
        "second-best": min(seconds, key=lambda counts: _order(tasks, counts), default=None),
        "keep": together([found.keep for _, found in pools]),
        "only-faulted-shrinks": together([found.only_faulted for _, found in pools]) if faulted else None,
        "equal-split": together([found.equal_split for _, found in pools]),
    }
    return _solution(tasks, best, "best"), [
        _solution(tasks, counts, label) for label, counts in candidates.items() if counts and counts != best
    ]


def _order(tasks: Sequence[TaskProblem], counts: Sequence[int]) -> tuple[float, int, int, list[int]]:
    """Return what assignments are compared by, the best being the least: objective, then as ties break."""
    return (
        -_solution(tasks, counts, "").objective,
        sum(touches(task, k) for task, k in zip(tasks, counts, strict=True)),
        sum(abs(k - task.current) for task, k in zip(tasks, counts, strict=True)),
        [-k for k in counts],
    )


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
    tasks = len(instance.tasks)
    if tasks == 0:
        return []
    # One search for all tasks: each one's counts lie behind those of the task before.
    behind = np.arange(tasks) * (instance.workers + 1)
    counts = instance.counts + np.repeat(behind, np.diff(instance.starts))
    last = np.searchsorted(counts, behind + instance.workers // tasks, side="right") - 1
    if np.any(last < instance.starts[:-1]):
        return None
    return instance.chosen(last)


def _only_faulted(inputs: Inputs, instance: Instance, keep: list[int] | None) -> list[int] | None:
    """Return the naive answer: healthy tasks keep their counts, faulted ones share the rest; None if it cannot be.

    Who is faulted is read from the inputs: those solved ahead differ in it from their tasks.
    """
    faulted = inputs.faulted != 0
    if not faulted.any():
        return keep
    healthy = [task for task, hit in zip(instance.tasks, faulted, strict=True) if not hit]
    if _fitting([t.current for t in healthy], healthy, instance.workers) is None:
        return None
    if np.count_nonzero(faulted) == 1:
        return _only_one(instance, int(np.argmax(faulted)))
    sizes = np.diff(instance.starts)
    current, shrinks = np.repeat(inputs.current, sizes), np.repeat(faulted, sizes)
    try:
        reduced = instance.only((instance.counts == current) | (shrinks & (instance.counts < current)))
        return _optimum(reduced, alternatives=False)[0]
    except InvalidInput:
        return None


def _only_one(instance: Instance, task: int) -> list[int] | None:
    """Return the counts if all tasks but this one keep theirs, and it gets the best of what is left, but no more."""
    counts = [item.current for item in instance.tasks]
    left = min(instance.workers - sum(counts) + counts[task], counts[task])
    useful = instance.useful(task)
    allowed = int(np.searchsorted(useful, left, side="right"))
    if allowed == 0:
        return None
    first = instance.starts[task]
    # Of equals, the last: it moves fewest workers.
    worth = instance.worth[first : first + allowed]
    counts[task] = int(useful[allowed - 1 - int(np.argmax(worth[::-1]))])
    return counts


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
