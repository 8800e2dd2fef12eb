"""What re-planning would have given where a task was restarted or retried in place. Pure.

Only SEV1 asks the solver. For the others this is a model: the newest problem that the solver had before, as it stood
when the fault struck, solved without the workers that the fault has stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from services.api.postmortem.counts import more_than_given, unused, useful_counts
from services.api.postmortem.model import OtherCount, Replanned
from shared.errors import InvalidInput
from shared.events.plans import Problem, Solution, TaskProblem
from shared.planning.solver import solve
from shared.planning.waf import term

_MODEL = [
    "throughput, times of transitions and D_running are those of the plan before",
    "with its workers back, the task waits for one to be started again and to take the state",
    "with fewer, the survivors go on by themselves",
    "without the worker means until the next failure, though a new process could use its place sooner",
]


def replanned(
    basis: str,
    problem: Problem,
    given: Mapping[str, int],
    name: str,
    workers: int,
    lost: int,
) -> Replanned | None:
    """Return what re-planning would have given a task that was restarted or retried in place.

    Args:
        basis: name of the plan whose problem is taken.
        problem: of that plan, with its throughput tables.
        given: the assignment that it decided.
        name: of the task.
        workers: that the task had.
        lost: how many of them the fault has stopped.

    Returns:
        None: the problem does not have the task, or says nothing of so many workers.
    """
    counts = {**given, name: workers}
    present = problem.model_copy(update={"tasks": [_present(task, counts, name, lost) for task in problem.tasks]})
    hit = next((task for task in present.tasks if task.name == name), None)
    if hit is None or hit.throughput.get(workers, 0.0) <= 0.0:
        return None
    shrunk = max((x for x in useful_counts(hit) if x <= workers - lost), default=0)
    left = _without(present, hit, lost)
    best: Solution | None = None
    with suppress(InvalidInput):  # raised where too little is left for the tasks that were admitted
        best = solve(left)
    return Replanned(
        task=name,
        workers=workers,
        restored_flop=term(hit, workers).objective,
        shrunk_workers=shrunk,
        shrunk_flop=term(hit, shrunk).objective if shrunk else 0.0,
        assignment=dict(sorted(best.assignment.items())) if best is not None else {},
        assignment_flop=best.objective if best is not None else 0.0,
        kept_flop=sum(term(task, task.current).objective for task in present.tasks),
        more=_more(present, hit, counts),
        basis=basis,
        assumptions=_MODEL,
    )


def _without(present: Problem, hit: TaskProblem, lost: int) -> Problem:
    """Return the problem without the workers that the fault has stopped."""
    pools = {pool: workers - lost if pool == hit.pool else workers for pool, workers in present.pools.items()}
    return present.model_copy(update={"workers": present.workers - lost, "pools": pools})


def _more(present: Problem, hit: TaskProblem, counts: Mapping[str, int]) -> OtherCount:
    """Return why a restarted task has no more workers than before."""
    more = more_than_given(present, hit, counts)
    free = unused(present, counts, hit.pool)
    if more.workers is None or more.workers - counts[hit.name] > free:
        return more
    if (more.less_flop or 0.0) < 0.0:
        reason = f"{free} are free and would help; the solver, which gives them, is asked at the next trigger"
        return more.model_copy(update={"reason": reason})
    return more


def _present(task: TaskProblem, counts: Mapping[str, int], hit: str, lost: int) -> TaskProblem:
    """Return a task's part of the problem as it stood when the fault struck: with the workers that it was given."""
    workers = counts.get(task.name, 0)
    is_hit = task.name == hit
    staying = workers - lost if is_hit else workers
    return task.model_copy(update={"current": workers, "faulted": is_hit, "staying": staying, "transition_to_s": {}})
