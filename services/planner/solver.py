"""Exact choice of worker counts: the dynamic program of the Unicron paper (section 5.2) over useful counts only.

    S(i, j) = max over useful k <= j of  G(t_i, k) + S(i+1, j-k)

``j`` workers are at most used. T is zero outside its table, so a task's useful counts are its table's support, 0 and
its current count. Tasks are taken in the order of their names, and the sum is folded from the last name to the first:
one order, so one result to the bit. A task that is ``required`` has only the counts at which F is positive.

Ties break by fewest tasks touched, then fewest workers moved, then by name: the earlier name gets more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from services.planner.waf import term, touches, waf_flop_per_s
from shared.errors import InvalidInput
from shared.plans import Problem, Solution, TaskProblem, Term

INFEASIBLE = float("-inf")
"""S where the required tasks cannot all have workers. It stays what it is under every sum."""


class _Option(NamedTuple):
    """A count a task may get: what it is worth, and what it costs in ties."""

    workers: int
    objective: float
    touched: int
    moved: int


class _Row(NamedTuple):
    """S(i, .): for each number of workers the best objective, its tie-break numbers and the count chosen for task i."""

    objective: list[float]
    touched: list[int]
    moved: list[int]
    choice: list[int]


def useful_counts(task: TaskProblem, workers: int) -> list[int]:
    """Return the counts worth trying, largest first: where F is positive, and unless required 0 and the current one."""
    limit = min(workers, task.maximum)
    counts = {k for k in task.throughput if 0 < k <= limit and waf_flop_per_s(task, k) > 0.0}
    if not task.required:
        counts.add(0)
        if task.current <= limit:
            counts.add(task.current)
    return sorted(counts, reverse=True)


def solve(problem: Problem) -> Solution:
    """Return the assignment of greatest objective, labelled ``best``.

    Raises:
        InvalidInput: the required tasks need more workers than there are.
    """
    tasks = _ordered(problem)
    options = [_options(task, useful_counts(task, problem.workers)) for task in tasks]
    return _solution(tasks, _chosen(_rows(options, problem.workers), problem.workers), "best")


def solve_with_alternatives(problem: Problem) -> tuple[Solution, list[Solution]]:
    """Return the best assignment and those it was preferred to.

    ``second-best``: the best of all others. ``keep``: every task keeps its count. ``only-faulted-shrinks``: healthy
    tasks keep theirs, faulted ones share what is left. ``equal-split``: the same number for each, rounded down to a
    useful count. An alternative that is infeasible, or is the best itself, is left out.

    Raises:
        InvalidInput: the required tasks need more workers than there are.
    """
    tasks = _ordered(problem)
    options = [_options(task, useful_counts(task, problem.workers)) for task in tasks]
    rows = _rows(options, problem.workers)
    counts = _chosen(rows, problem.workers)
    best = _solution(tasks, counts, "best")
    candidates = {
        "second-best": _second(options, rows, counts, problem.workers),
        "keep": _fitting([task.current for task in tasks], tasks, problem.workers),
        "only-faulted-shrinks": _only_faulted(tasks, problem.workers),
        "equal-split": _equal_split(tasks, problem.workers),
    }
    return best, [
        _solution(tasks, found, label) for label, found in candidates.items() if found is not None and found != counts
    ]


def evaluate(problem: Problem, assignment: Mapping[str, int], label: str) -> Solution:
    """Return the value of a given assignment; a task that is absent gets 0."""
    tasks = _ordered(problem)
    return _solution(tasks, [assignment.get(task.name, 0) for task in tasks], label)


def _ordered(problem: Problem) -> list[TaskProblem]:
    return sorted(problem.tasks, key=lambda task: task.name)


def _options(task: TaskProblem, counts: Sequence[int]) -> list[_Option]:
    return [_Option(k, term(task, k).objective, 1 if touches(task, k) else 0, abs(k - task.current)) for k in counts]


def _rows(options: Sequence[Sequence[_Option]], workers: int) -> list[_Row]:
    """Return S(1, .) .. S(m, .), and after them S of no task at all."""
    size = workers + 1
    after = _Row([0.0] * size, [0] * size, [0] * size, [0] * size)
    rows = [after]
    for choices in reversed(options):
        after = _row(choices, after, size)
        rows.append(after)
    rows.reverse()
    return rows


def _row(choices: Sequence[_Option], after: _Row, size: int) -> _Row:
    """Return S(i, .) from S(i+1, .). Larger counts come first and only a better one replaces them."""
    row = _Row([INFEASIBLE] * size, [0] * size, [0] * size, [0] * size)
    best, touched, moved, choice = row
    values, touched_after, moved_after, _ = after
    for k, worth, touch, move in choices:
        for j in range(k, size):
            value = worth + values[j - k]
            if value < best[j] or value == INFEASIBLE:
                continue
            if value == best[j]:
                cost = (touch + touched_after[j - k], move + moved_after[j - k])
                if cost >= (touched[j], moved[j]):
                    continue
            best[j] = value
            touched[j] = touch + touched_after[j - k]
            moved[j] = move + moved_after[j - k]
            choice[j] = k
    return row


def _chosen(rows: Sequence[_Row], workers: int) -> list[int]:
    """Return the best counts of all tasks."""
    if rows[0].objective[workers] == INFEASIBLE:
        raise InvalidInput(f"the required tasks need more than {workers} workers")
    return _walk(rows, workers)


def _walk(rows: Sequence[_Row], workers: int, first: int = 0) -> list[int]:
    """Return the counts of tasks ``first`` .. m that S chose for this many workers."""
    counts = []
    left = workers
    for row in rows[first:-1]:
        counts.append(row.choice[left])
        left -= row.choice[left]
    return counts


def _second(
    options: Sequence[Sequence[_Option]], rows: Sequence[_Row], counts: Sequence[int], workers: int
) -> list[int] | None:
    """Return the best assignment that differs from ``counts``.

    Any other assignment leaves ``counts`` first at some task; from there on S gives the best continuation.
    """
    worth = [next(o for o in choices if o.workers == k) for choices, k in zip(options, counts, strict=True)]
    found: tuple[float, int, int] | None = None
    second: list[int] | None = None
    left = workers
    for i, choices in enumerate(options):
        rest = rows[i + 1]
        for option in choices:
            if option.workers == counts[i] or option.workers > left:
                continue
            j = left - option.workers
            if rest.objective[j] == INFEASIBLE:
                continue
            value = option.objective + rest.objective[j]
            touched = option.touched + rest.touched[j]
            moved = option.moved + rest.moved[j]
            for before in reversed(worth[:i]):
                value = before.objective + value
                touched += before.touched
                moved += before.moved
            key = (value, -touched, -moved)
            if found is not None and key < found:
                continue
            candidate = [*counts[:i], option.workers, *_walk(rows, j, i + 1)]
            if second is None or found is None or key > found or candidate > second:
                found, second = key, candidate
        left -= counts[i]
    return second


def _fitting(counts: list[int], tasks: Sequence[TaskProblem], workers: int) -> list[int] | None:
    """Return the counts if they are feasible."""
    allowed = all(
        k <= task.maximum and not (task.required and waf_flop_per_s(task, k) <= 0.0)
        for k, task in zip(counts, tasks, strict=True)
    )
    return counts if allowed and sum(counts) <= workers else None


def _equal_split(tasks: Sequence[TaskProblem], workers: int) -> list[int] | None:
    counts = []
    for task in tasks:
        within = [k for k in useful_counts(task, workers) if k <= workers // len(tasks)]
        if not within:
            return None
        counts.append(within[0])
    return counts


def _only_faulted(tasks: Sequence[TaskProblem], workers: int) -> list[int] | None:
    """Return the naive answer: healthy tasks keep their counts, faulted ones share the rest; None if it cannot be."""
    healthy = [task for task in tasks if not task.faulted]
    if len(healthy) == len(tasks) or _fitting([t.current for t in healthy], healthy, workers) is None:
        return None
    options = []
    for task in tasks:
        smaller = [k for k in useful_counts(task, workers) if k <= task.current]
        options.append(_options(task, smaller if task.faulted else [task.current]))
    rows = _rows(options, workers)
    return None if rows[0].objective[workers] == INFEASIBLE else _walk(rows, workers)


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
