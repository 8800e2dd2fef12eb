"""Exact choice of worker counts: the multiple-choice knapsack problem of the Unicron paper (section 5.2).

    maximise  sum of G(t, x_t)   over useful counts x_t with  sum of x_t <= workers

T is zero outside its table. So the useful counts of a task are those of its table where F is positive, 0, and its
current count; a task that is ``required`` has only the first. The paper's dynamic program takes O(m n^2) time. This
solver uses Lagrange multipliers:

1. A count that is no better than a smaller one of its task is dropped (with the penalty-free current count among them).
2. At any price of a worker, each task has a best count. The sum of G over those, and the price of all workers, bound
   every assignment (``kernels.relaxation``). The price is that of the relaxation by concave envelopes, where the bound
   is least.
3. Each count loses a known amount against its task's best count at that price. The value of an assignment is the bound
   less its losses and the price of unused workers. So the assignments within a budget of losses are built task by task
   from few counts and few partial sums (``kernels.search``). If the best of them has at least the value bound - budget,
   no other assignment is better. Otherwise the budget grows, up to the losses of a greedy assignment.

**Arithmetic.** G is computed in float64 by the formulas of ``waf.py`` and then rounded to an integral number of units,
a power of two such that all G together stay below 2**58. All further arithmetic is on integers: exact, in any order, on
any machine. The rounding is below the last bit of the float64 sum. The returned objective is the float64 sum of the
terms, from the last name to the first.

**Ties** are resolved by fewest tasks touched, then fewest workers moved, then by name: the earlier name gets more.

**Pools.** A task runs on workers of one kind. Where there are several kinds, each is a problem of its own, solved
exactly (``pools_of``), and the answer to the whole consists of the answers of the pools.

The modules ``instance.py`` (arrays), ``compiled.py`` (numba) and ``kernels`` (the loops) do the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shared.errors import InvalidInput
from shared.events.plans import Problem, Solution, TaskProblem, Term
from shared.planning.instance import Inputs, Instance, TableCache
from shared.planning.kernels.arrays import ProofNumbers
from shared.planning.waf import term, touches, waf_flop_per_s


class Proof(NamedTuple):
    """Why the best assignment is the best; all values in weighted FLOP.

    Attributes:
        bound: no assignment has a greater value.
        relaxation: bound of the relaxation, before the search.
        price: value of one more worker at that bound.
        budget: all assignments of a value above ``relaxation - budget`` were looked at.
        states: number of partial assignments that the search kept.
    """

    bound: float
    relaxation: float
    price: float
    budget: float
    states: int


def solve(problem: Problem) -> Solution:
    """Return the assignment of the greatest objective, labelled ``best``.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    return solve_with_proof(problem)[0]


def solve_with_proof(problem: Problem) -> tuple[Solution, Proof]:
    """Return the best assignment and the proof that it is the best.

    For several pools, the price is that of the dearest worker, and all other numbers are sums.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    counts: dict[str, int] = {}
    proofs = []
    for pool in pools_of(problem):
        instance = Instance.of(Inputs.of(pool))
        found, _, proof = _optimum(instance, alternatives=False)
        counts |= dict(zip((task.name for task in instance.tasks), found, strict=True))
        proofs.append(_proof(proof, instance.exponent))
    solution = evaluate(problem, counts, "best")
    return solution, Proof(
        bound=solution.objective + sum(proof.bound for proof in proofs),
        relaxation=sum(proof.relaxation for proof in proofs),
        price=max(proof.price for proof in proofs),
        budget=sum(proof.budget for proof in proofs),
        states=sum(proof.states for proof in proofs),
    )


def _proof(numbers: ProofNumbers, exponent: int) -> Proof:
    """Return the proof of one pool in weighted FLOP; ``bound`` is what other assignments may have above the best."""
    bound, value, budget = int(numbers.bound), int(numbers.value), int(numbers.budget)
    # The search went through every assignment of a value above bound - budget. All others have at most that value.
    gap = max(value, bound - budget) - value
    unit = 2.0**exponent
    return Proof(gap * unit, bound * unit, int(numbers.price) * unit, budget * unit, int(numbers.states))


class Counts(NamedTuple):
    """Worker counts of a pool's tasks, by name: the best assignment and its alternatives.

    ``solve_with_alternatives`` explains them. None: there is no such assignment.
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
    """Return the counts of a single pool. They take most of the time; ``answer`` makes the solutions from them.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    if not inputs.tasks:
        return Counts([], None, [], [], [])  # nodes of a fleet join before there is a task, and each has a plan
    instance = Instance.of(inputs)
    best, second, _ = _optimum(instance, alternatives=True)
    tasks = instance.tasks
    keep = _fitting([task.current for task in tasks], tasks, inputs.workers)
    return Counts(best, second, keep, _only_faulted(inputs, instance, keep), _equal_split(instance))


def solve_with_alternatives(problem: Problem, cache: TableCache | None = None) -> tuple[Solution, list[Solution]]:
    """Return the best assignment and the alternatives that it was preferred to.

    ``second-best``: the best of all others. ``keep``: every task keeps its count. ``only-faulted-shrinks``: healthy
    tasks keep their counts, and faulted ones share the rest. ``equal-split``: the same number for each task of a pool,
    rounded down to a useful count. An alternative that is infeasible, or equal to the best, is left out.

    ``cache``: the cache of throughput tables, for a caller that solves many problems with the same tables.

    Raises:
        InvalidInput: the required tasks need more workers than there are, or the objective overflows.
    """
    pools = [Inputs.of(pool, cache) for pool in pools_of(problem)]
    return answer([(inputs, best_counts(inputs)) for inputs in pools])


def answer(pools: Sequence[tuple[Inputs, Counts]]) -> tuple[Solution, list[Solution]]:
    """Return the solutions that follow from the counts of each pool; see ``solve_with_alternatives``."""
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
    second: list[int] | None = seconds[0] if seconds else None
    if len(seconds) > 1:  # there are several pools; with one, nothing has to be compared
        second = min(seconds, key=lambda counts: _order(tasks, counts))
    faulted = any(task.faulted for task in tasks)
    candidates = {
        "second-best": second,
        "keep": together([found.keep for _, found in pools]),
        "only-faulted-shrinks": together([found.only_faulted for _, found in pools]) if faulted else None,
        "equal-split": together([found.equal_split for _, found in pools]),
    }
    return _solution(tasks, best, "best"), [
        _solution(tasks, counts, label) for label, counts in candidates.items() if counts and counts != best
    ]


def _order(tasks: Sequence[TaskProblem], counts: Sequence[int]) -> tuple[float, int, int, list[int]]:
    """Return the sort key of an assignment, least first: greatest objective, then the order of ties."""
    return (
        -_solution(tasks, counts, "").objective,
        sum(touches(task, k) for task, k in zip(tasks, counts, strict=True)),
        sum(abs(k - task.current) for task, k in zip(tasks, counts, strict=True)),
        [-k for k in counts],
    )


def evaluate(problem: Problem, assignment: Mapping[str, int], label: str) -> Solution:
    """Return the solution of a given assignment. A task that is absent gets 0."""
    tasks = sorted(problem.tasks, key=lambda task: task.name)
    return _solution(tasks, [assignment.get(task.name, 0) for task in tasks], label)


def _optimum(instance: Instance, *, alternatives: bool) -> tuple[list[int], list[int] | None, ProofNumbers]:
    """Return the best counts, the second best if asked for and there are any, and the proof."""
    found = instance.kernels.optimise(instance.choices, instance.workers, alternatives)
    if not found.feasible:
        raise InvalidInput(f"the required tasks need more than {instance.workers} workers")
    second = instance.chosen(found.second) if found.has_second else None
    return instance.chosen(found.best), second, found.proof


def _fitting(counts: list[int], tasks: Sequence[TaskProblem], workers: int) -> list[int] | None:
    """Return the counts if they are feasible, else None."""
    allowed = all(
        k <= task.maximum and not (task.required and waf_flop_per_s(task, k) <= 0.0)
        for k, task in zip(counts, tasks, strict=True)
    )
    return counts if allowed and sum(counts) <= workers else None


def _equal_split(instance: Instance) -> list[int] | None:
    """Return the same number for each task, rounded down to useful counts; None if a task has no such count."""
    tasks = len(instance.tasks)
    if tasks == 0:
        return []
    # One search for all tasks: an offset puts the counts of each task after those of the task before.
    behind = np.arange(tasks) * (instance.workers + 1)
    counts = instance.choices.counts + np.repeat(behind, np.diff(instance.choices.starts))
    last = np.searchsorted(counts, behind + instance.workers // tasks, side="right") - 1
    if np.any(last < instance.choices.starts[:-1]):
        return None
    return instance.chosen(last)


def _only_faulted(inputs: Inputs, instance: Instance, keep: list[int] | None) -> list[int] | None:
    """Return the naive answer: healthy tasks keep their counts, faulted ones share the rest; None if it is infeasible.

    The inputs say which tasks are faulted. In inputs of the look-ahead they differ from ``Inputs.tasks``.
    """
    faulted = inputs.task_arrays.faulted != 0
    if not faulted.any():
        return keep
    healthy = [task for task, hit in zip(instance.tasks, faulted, strict=True) if not hit]
    if _fitting([t.current for t in healthy], healthy, instance.workers) is None:
        return None
    if np.count_nonzero(faulted) == 1:
        return _only_one(instance, int(np.argmax(faulted)))
    sizes = np.diff(instance.choices.starts)
    current, shrinks = np.repeat(inputs.task_arrays.current, sizes), np.repeat(faulted, sizes)
    try:
        reduced = instance.only((instance.choices.counts == current) | (shrinks & (instance.choices.counts < current)))
        return _optimum(reduced, alternatives=False)[0]
    except InvalidInput:
        return None


def _only_one(instance: Instance, task: int) -> list[int] | None:
    """Return the counts where this task alone changes: it gets its best count of what the others leave, no larger."""
    counts = [item.current for item in instance.tasks]
    left = min(instance.workers - sum(counts) + counts[task], counts[task])
    useful = instance.useful(task)
    allowed = int(np.searchsorted(useful, left, side="right"))
    if allowed == 0:
        return None
    first = instance.choices.starts[task]
    # Of equal values the last one counts, which moves fewest workers.
    value = instance.choices.value[first : first + allowed]
    counts[task] = int(useful[allowed - 1 - int(np.argmax(value[::-1]))])
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
