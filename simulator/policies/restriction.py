"""Restricted planning problems: no task pays for another's fault.

A policy without an eye for the whole cluster gives a task only what it had and what is free. So a task that is not
faulted, and that achieves something, gets at least its present count. The problem with that limit is solved exactly,
by the solver of the running system.
"""

from __future__ import annotations

from collections.abc import Collection

from services.planner.state.admission import least_count
from shared.events.plans import Problem, Solution, TaskProblem
from shared.planning.solver import evaluate, solve_with_alternatives
from shared.planning.waf import waf_flop_per_s


def solve_without_taking(problem: Problem) -> tuple[Solution, list[Solution]]:
    """Return the best assignment in which no healthy task gets fewer workers, and its alternatives.

    The solutions are evaluated as answers to ``problem`` itself. Where the workers do not suffice for the present
    counts of the healthy tasks, they all may shrink.

    Raises:
        InvalidInput: the required tasks of ``problem`` need more workers than there are.
    """
    best, others = solve_with_alternatives(without_taking(problem))
    return _answering(problem, best), [_answering(problem, other) for other in others]


def without_taking(problem: Problem) -> Problem:
    """Return the problem in which healthy tasks are required to have at least their present counts.

    Of the other required tasks, those stay required that still fit with their least counts: heavy ones first, then by
    name, as the planner admits them (``services.planner.state.admission``).
    """
    room = _room(problem)
    kept = {task.name for task in problem.tasks if is_kept(task)}
    for pool in room:
        inside = [task for task in problem.tasks if task.name in kept and _pool(task, room) == pool]
        needed = sum(task.current for task in inside)
        if needed > room[pool]:
            kept -= {task.name for task in inside}
        else:
            room[pool] -= needed
    required = kept | _still_required(problem, kept, room)
    return problem.model_copy(update={"tasks": [_limited(task, kept, required) for task in problem.tasks]})


def is_kept(task: TaskProblem) -> bool:
    """Return whether a fault of another task must not cost this one any worker."""
    return not task.faulted and 0 < task.current <= task.maximum and waf_flop_per_s(task, task.current) > 0.0


def _room(problem: Problem) -> dict[str, int]:
    """Return the workers of each pool; of the only pool under the empty name."""
    return dict(problem.pools) or {"": problem.workers}


def _pool(task: TaskProblem, room: Collection[str]) -> str:
    return task.pool if task.pool in room else ""


def _still_required(problem: Problem, kept: Collection[str], room: dict[str, int]) -> set[str]:
    """Return the names of the required tasks beside the kept ones that fit into the room which these leave."""
    left, found = dict(room), set()
    others = [task for task in problem.tasks if task.required and task.name not in kept]
    for task in sorted(others, key=lambda task: (-task.weight, task.name)):
        least, pool = least_count(task), _pool(task, left)
        if least is not None and least <= left[pool]:
            left[pool] -= least
            found.add(task.name)
    return found


def _limited(task: TaskProblem, kept: Collection[str], required: Collection[str]) -> TaskProblem:
    necessary = max(task.necessary, task.current) if task.name in kept else task.necessary
    return task.model_copy(update={"necessary": necessary, "required": task.name in required})


def _answering(problem: Problem, solution: Solution) -> Solution:
    """Return the same assignment as a solution of the problem without the limit."""
    return evaluate(problem, solution.assignment, solution.label)
