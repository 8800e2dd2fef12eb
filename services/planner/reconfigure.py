"""Asking the solver: the counts that are best for the whole cluster, and what they change for each task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from services.planner.changes import leave, move
from services.planner.placement import Want, place
from services.planner.problem import available_workers, build_problem, least_count, wanting
from services.planner.state import State, Task
from shared.planning.waf import touches
from shared.plans import Problem, Solution, TaskChange, TaskProblem

Solve = Callable[[Problem], tuple[Solution, list[Solution]]]
"""What answers a problem with the best assignment and the alternatives (``solver.solve_with_alternatives``)."""


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """The solver's answer and what follows from it."""

    changes: list[TaskChange]
    queued: dict[str, str]
    problem: Problem
    solution: Solution
    alternatives: list[Solution]


def reconfigure(state: State, at: datetime, why: str, solve: Solve) -> Reconfiguration:
    """Return the best assignment for the state, placed. ``why``: what happened, in words.

    Only tasks that are faulted, or whose count the solver changes, are touched.
    """
    problem = build_problem(state, at)
    solution, alternatives = solve(problem)
    problems = {task.name: task for task in problem.tasks}
    touched = [task for task in wanting(state) if touches(problems[task.name], solution.assignment[task.name])]
    workers = _place(state, touched, solution)
    changes = []
    for task in touched:
        count = solution.assignment[task.name]
        counts = (
            f"{len(task.members)} -> {count} workers" if count != len(task.members) else f"{count} workers as before"
        )
        reason = f"{why}; {counts}"
        if count > 0:
            changes.append(move(state, task, workers[task.name], reason))
        elif task.members or task.kept:
            changes.append(leave(state, task, "pause", reason))
    queued = {
        task.name: _queued_reason(problems[task.name], problem.workers)
        for task in wanting(state)
        if solution.assignment[task.name] == 0
    }
    return Reconfiguration(changes, queued, problem, solution, alternatives)


def worker_order(state: State, task: Task) -> list[str]:
    """Return the usable workers planned for the task: those that hold its state first, each in rank order.

    A holder that a plan under way has given to another task is not among them.
    """
    members = set(task.members)
    elsewhere = {w for other in state.tasks.values() if other.name != task.name for w in other.members}
    kept = [w for w in task.kept if w in members or w not in elsewhere]
    rest = [w for w in task.members if w not in kept]
    return [w for w in (*kept, *rest) if state.usable(w)]


def same_workers(state: State, task: Task) -> list[str]:
    """Return the workers of a task that keeps its count, in rank order: for a retry or a restart in place.

    Those that were planned. Only where none of them holds the state, one that was to be released stays in their place.
    """
    members = [worker for worker in task.members if state.usable(worker)]
    if task.replica > 1:
        return members
    kept = [worker for worker in task.kept if worker in members]
    if not kept:
        return worker_order(state, task)[: len(members)]
    return kept + [worker for worker in members if worker not in kept]


def _place(state: State, touched: list[Task], solution: Solution) -> dict[str, list[str]]:
    names = {task.name for task in touched}
    fixed = {w for task in state.tasks.values() if task.name not in names for w in task.members}
    free = dict.fromkeys(worker for worker in available_workers(state) if worker not in fixed)
    wants = [
        Want(
            name=task.name,
            count=solution.assignment[task.name],
            group=task.spec.tensor,
            keep=[w for w in worker_order(state, task) if w in free],
        )
        for task in touched
    ]
    busy = {w for task in state.tasks.values() for w in task.occupied}
    return place(wants, state.nodes, free, busy)


def _queued_reason(task: TaskProblem, workers: int) -> str:
    """Return why the task gets no worker."""
    if not task.throughput:
        return f"no layout of it runs on {workers} workers"
    if task.necessary > workers:
        return f"needs at least {task.necessary} workers; {workers} can be had"
    return f"needs at least {least_count(task)} workers; other tasks come first for the {workers} there are"
