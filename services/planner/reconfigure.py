"""Asking the solver: the counts that are best for the whole cluster, and what they change for each task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from services.planner.admission import called, queued_reason
from services.planner.changes import leave, move
from services.planner.placement import Placed, Want, place
from services.planner.problem import build_problem, wanting, withheld_workers
from services.planner.state import State, Task
from services.planner.tables import layout_of
from shared.planning.waf import touches
from shared.plans import Problem, Solution, TaskChange

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
    touched = [
        task.model_copy(update={"pool": problems[task.name].pool})
        for task in wanting(state)
        if touches(problems[task.name], solution.assignment[task.name])
    ]
    placed = _place(state, touched, problem, solution)
    changes = []
    for task in touched:
        count = solution.assignment[task.name]
        counts = (
            f"{len(task.members)} -> {count} workers" if count != len(task.members) else f"{count} workers as before"
        )
        reason = f"{why}; {counts}"
        if count > 0:
            workers, crossing = placed[task.name]
            if crossing:
                reason = f"{reason}; {crossing} tensor groups span nodes: no node has room for a whole one"
            changes.append(move(state, task, workers, reason))
        elif task.members or task.kept:
            changes.append(leave(state, task, "pause", reason))
    starved = called(state, at)
    queued = {
        task.name: queued_reason(problems[task.name], problem, solution, starved)
        for task in wanting(state)
        if solution.assignment[task.name] == 0
    }
    return Reconfiguration(changes, queued, problem, solution, alternatives)


def worker_order(state: State, task: Task, planned: Mapping[str, str] | None = None) -> list[str]:
    """Return the usable workers planned for the task: those that hold its state first, each in rank order.

    A holder that a plan under way has given to another task is not among them. ``planned``: ``planned_workers``.
    """
    of = planned_workers(state.tasks.values()) if planned is None else planned
    kept = [w for w in task.kept if of.get(w, task.name) == task.name]
    held = set(kept)
    return [w for w in (*kept, *(w for w in task.members if w not in held)) if state.usable(w)]


def planned_workers(tasks: Iterable[Task]) -> dict[str, str]:
    """Return the task each worker is planned for."""
    return {worker: task.name for task in tasks for worker in task.members}


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


def _place(state: State, touched: list[Task], problem: Problem, solution: Solution) -> dict[str, Placed]:
    """Return the workers of the touched tasks, pool by pool."""
    names = {task.name for task in touched}
    free = _free(state, names)
    planned = planned_workers(touched)
    busy = set[str]().union(*(task.occupied for task in state.tasks.values()))
    placed: dict[str, Placed] = {}
    for pool in problem.pools or [""]:
        room = {node: workers for node, workers in free.items() if pool in ("", state.nodes[node].hardware)}
        within = {worker for workers in room.values() for worker in workers}
        mine = [task for task in touched if not problem.pools or task.pool == pool]
        layouts = {task.name: layout_of(state, task, solution.assignment[task.name]) for task in mine}
        wants = [
            Want(
                name=task.name,
                count=solution.assignment[task.name],
                tensor=layouts[task.name].tensor,
                pipeline=layouts[task.name].pipeline,
                keep=[w for w in worker_order(state, task, planned) if w in within],
                holders=frozenset(task.kept),
                ranks=task.members,
            )
            for task in mine
        ]
        placed |= place(wants, state.nodes, room, busy, state.incidents)
    return placed


def _free(state: State, names: Collection[str]) -> dict[str, list[str]]:
    """Return the workers, node by node, that the named tasks may have: no other task keeps them."""
    fixed = set[str]().union(*(task.members for task in state.tasks.values() if task.name not in names))
    fixed |= withheld_workers(state)
    found = {}
    for name, node in state.nodes.items():
        if node.usable and not fixed.issuperset(node.workers):
            found[name] = [worker for worker in node.workers if worker not in fixed]
    return found
