"""Why a plan gives tasks as many workers as it does, and not more or fewer. Pure.

The reasons are those of the plan's own objective: each number is computed from the problem in the log, as the solver
did (``shared.planning.waf``).
"""

from __future__ import annotations

from collections.abc import Mapping

from services.api.flop_text import flop
from services.api.postmortem.model import CountReason, OtherCount, Replanned
from shared.planning.waf import term
from shared.plans import Problem, Solution, TaskProblem

_MODEL = [
    "throughput, times of transitions and D_running are those of the plan before",
    "with its workers back, the task waits for one to be started again and to take the state",
    "with fewer, the survivors go on by themselves, and no other task gets what becomes free",
]


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
            more=_more(problem, task, given),
        )
        for task in sorted(problem.tasks, key=lambda task: task.name)
    ]


def unused(problem: Problem, assignment: Mapping[str, int], pool: str | None = None) -> int:
    """Return the workers that an assignment leaves without a task, of one kind or of all."""
    tasks = [task for task in problem.tasks if pool is None or not problem.pools or task.pool == pool]
    workers = problem.workers if pool is None or not problem.pools else problem.pools[pool]
    return workers - sum(assignment[task.name] for task in tasks)


def _useful(task: TaskProblem) -> list[int]:
    """Return the numbers of workers at which the task achieves something, ascending."""
    return [x for x in sorted(task.throughput) if max(1, task.necessary) <= x <= task.maximum]


def _below(task: TaskProblem, workers: int) -> int:
    return max((x for x in _useful(task) if x < workers), default=0)


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


def _more(problem: Problem, task: TaskProblem, given: Mapping[str, int]) -> OtherCount:
    workers = given[task.name]
    higher = next((x for x in _useful(task) if x > workers), None)
    if higher is None:
        if workers >= task.maximum and task.maximum < problem.workers:
            return OtherCount(workers=None, less_flop=None, reason=f"its specification allows at most {task.maximum}")
        return OtherCount(workers=None, less_flop=None, reason="no layout on more of the workers there are is faster")
    less = term(task, workers).objective - term(task, higher).objective
    free = unused(problem, given, task.pool)
    lacking = higher - workers - free
    if lacking <= 0:
        reason = f"{free} workers are free, but the change costs more than it brings until the next failure"
        return OtherCount(workers=higher, less_flop=less, reason=reason)
    donor = _cheapest_donor(problem, task, given, lacking)
    if donor is None:
        reason = f"{higher - workers} more are needed and {free} are free: no other task can give {lacking}"
        return OtherCount(workers=higher, less_flop=less, reason=reason)
    name, left, loses = donor
    reason = (
        f"{higher - workers} more are needed and {free} are free; {name} would have to go down to {left}, "
        f"which loses {flop(loses)} where this gains {flop(max(-less, 0.0))}"
    )
    return OtherCount(workers=higher, less_flop=less, reason=reason)


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


def replanned(basis: str, problem: Problem, name: str, workers: int, lost: int) -> Replanned | None:
    """Return what re-planning would have given a task that was restarted or retried in place.

    Args:
        basis: name of the plan whose problem is taken.
        problem: of that plan, with its throughput tables.
        name: of the task.
        workers: that it had.
        lost: how many of them the fault has stopped.

    Returns:
        None: the problem does not have the task, or nothing below its number is useful.
    """
    posed = next((task for task in problem.tasks if task.name == name), None)
    if posed is None or posed.throughput.get(workers, 0.0) <= 0.0:
        return None
    hit = posed.model_copy(
        update={"current": workers, "faulted": True, "staying": workers - lost, "transition_to_s": {}}
    )
    shrunk = max((x for x in _useful(hit) if x <= workers - lost), default=0)
    return Replanned(
        task=name,
        workers=workers,
        restored_flop=term(hit, workers).objective,
        shrunk_workers=shrunk,
        shrunk_flop=term(hit, shrunk).objective if shrunk else 0.0,
        basis=basis,
        assumptions=_MODEL,
    )
