"""Why a plan gives tasks as many workers as it does, and not more or fewer. Pure.

The reasons are those of the plan's own objective: each number is computed from the problem in the log, as the solver
did (``shared.planning.waf``).
"""

from __future__ import annotations

from collections.abc import Mapping

from services.api.postmortem.model import CountReason, OtherCount
from shared.events.plans import Problem, Solution, TaskProblem
from shared.planning.waf import term
from shared.text import flop


def count_reasons(problem: Problem, solution: Solution) -> list[CountReason]:
    """Return for each task of a problem why it has as many workers as the solution gives it, by name.

    Args:
        problem: with its throughput tables (``Problem.with_tables``).
        solution: the one that was chosen.
    """
    given = solution.assignment
    return [
        CountReason(
            task=task.name,
            workers=given[task.name],
            fewer=_fewer(task, given[task.name]),
            more=more_than_given(problem, task, given),
        )
        for task in sorted(problem.tasks, key=lambda task: task.name)
    ]


def unused(problem: Problem, assignment: Mapping[str, int], pool: str | None = None) -> int:
    """Return the workers that an assignment leaves without a task, of one kind or of all."""
    tasks = [task for task in problem.tasks if pool is None or not problem.pools or task.pool == pool]
    workers = problem.workers if pool is None or not problem.pools else problem.pools[pool]
    return workers - sum(assignment[task.name] for task in tasks)


def useful_counts(task: TaskProblem) -> list[int]:
    """Return the numbers of workers at which the task achieves something, ascending."""
    return [x for x in sorted(task.throughput) if max(1, task.necessary) <= x <= task.maximum]


def _below(task: TaskProblem, workers: int) -> int:
    return max((x for x in useful_counts(task) if x < workers), default=0)


def _fewer(task: TaskProblem, workers: int) -> OtherCount:
    if workers == 0:
        return OtherCount(workers=None, less_flop=None, reason="it has none")
    lower = _below(task, workers)
    less = term(task, workers).objective - term(task, lower).objective
    if lower == 0:
        what = "it would train no more" if task.necessary <= 1 else f"it needs at least {task.necessary} to train"
    else:
        slower = term(task, lower).waf_flop_per_s / max(term(task, workers).waf_flop_per_s, 1e-300)
        what = f"it would train at {slower:.2f} of that rate"
    if less <= 0.0:
        what += "; that is worth as much, and other tasks gain nothing from what becomes free"
    return OtherCount(workers=lower, less_flop=less, reason=what)


def more_than_given(problem: Problem, task: TaskProblem, given: Mapping[str, int]) -> OtherCount:
    """Return why a task has no more workers than an assignment gives it."""
    workers = given[task.name]
    higher = next((x for x in useful_counts(task) if x > workers), None)
    if higher is None:
        if workers >= task.maximum and task.maximum < problem.workers:
            return OtherCount(workers=None, less_flop=None, reason=f"its specification allows at most {task.maximum}")
        return OtherCount(workers=None, less_flop=None, reason="no layout on more of the workers there are is faster")
    less = term(task, workers).objective - term(task, higher).objective
    free = unused(problem, given, task.pool)
    lacking = higher - workers - free
    if lacking <= 0:
        reason = f"{_free(free)}, but the change costs {flop(less)} more than it brings until the next failure"
        return OtherCount(workers=higher, less_flop=less, reason=reason)
    donor = _cheapest_donor(problem, task, given, lacking)
    if donor is None:
        reason = f"{_needed(higher - workers, free)}: no other task can give {lacking}"
        return OtherCount(workers=higher, less_flop=less, reason=reason)
    name, left, loses = donor
    reason = (
        f"{_needed(higher - workers, free)}; {name} would have to go down to {left}, "
        f"which loses {flop(loses)} where this gains {flop(max(-less, 0.0))}"
    )
    return OtherCount(workers=higher, less_flop=less, reason=reason)


def _free(workers: int) -> str:
    return "1 worker is free" if workers == 1 else f"{workers or 'no'} workers are free"


def _needed(workers: int, free: int) -> str:
    return f"{workers} more {'is' if workers == 1 else 'are'} needed, and {_free(free)}"


def _cheapest_donor(
    problem: Problem, task: TaskProblem, given: Mapping[str, int], lacking: int
) -> tuple[str, int, float] | None:
    """Return the task that loses least if it gives up so many workers: its name, what it is left with, its loss."""
    found = []
    for other in problem.tasks:
        have = given[other.name]
        if other.name == task.name or (problem.pools and other.pool != task.pool) or have < lacking:
            continue
        left = _below(other, have - lacking + 1)
        if left == 0 and other.required:
            continue
        found.append((term(other, have).objective - term(other, left).objective, other.name, left))
    if not found:
        return None
    loses, name, left = min(found)
    return name, left, loses
