"""Reconfiguration: the worker counts that are best for the whole cluster, and the changes that follow from them.

``problem.py`` poses the problem, the solver answers it, ``ranks.py`` turns counts into workers, and ``changes.py``
turns workers into stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from services.planner.placement.cells import NoRoom, PlacementRequest
from services.planner.placement.changes import leave, move
from services.planner.placement.closed_nodes import reserved_workers, without_cordons
from services.planner.placement.ranks import Placed, place
from services.planner.problem.problem import Solve as Solve
from services.planner.problem.problem import (
    build_problem,
    claimed_workers,
    home_workers,
    staying_workers,
    wanting,
    withheld_workers,
)
from services.planner.problem.slow_choices import has_question, ranking
from services.planner.state.admission import called, queued_reason
from services.planner.state.cluster import State, Task, Unwritten, node_of, without
from services.planner.state.slow_workers import forget_slowness, lent_workers, slowdown_of, taken_members
from services.planner.state.usable_nodes import open_workers, usable_workers
from services.planner.throughput.tables import layout_of, unlogged_tables
from shared.events.plans import LoggedTable, Problem, SlowWorkers, Solution, TaskChange
from shared.planning.waf import touches


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """The solver's answer and what follows from it.

    ``changes``: what is done to the tasks that are touched. ``queued``: why each task without workers has none.
    ``tables``: the throughput tables of the problem that the log does not have yet, by digest. ``slow``: how slow
    workers are used.
    """

    changes: list[TaskChange]
    queued: dict[str, str]
    problem: Problem
    solution: Solution
    alternatives: list[Solution]
    tables: dict[str, LoggedTable]
    slow: SlowWorkers | None = None


def reconfigure(state: State, at: datetime, why: str, solve: Solve) -> Reconfiguration:
    """Return the best assignment for the state, with workers for all tasks that it changes.

    Only tasks that are faulted, or whose count the solver changes, are touched. ``why``: what happened, in words.

    The workers of cordoned nodes count for the solver like all others, and can be given to no other task. Where its
    answer cannot be placed for that reason, tasks leave the cordoned nodes.
    """
    try:
        return _with_homes(state, at, why, solve)
    except NoRoom:
        return _with_homes(without_cordons(state), at, why, solve)


def _with_homes(state: State, at: datetime, why: str, solve: Solve) -> Reconfiguration:
    """Return the best assignment in which tasks that have to have certain workers back have these, or none.

    Where others come first, these are asked for no worker, and the task waits on.
    """
    found = _reconfigure(state, at, why, solve)
    if not (claimed := claimed_workers(state)):
        return found
    in_vain = [name for name in sorted(set(claimed.values())) if found.solution.assignment[name] == 0]
    for name in in_vain:
        nodes = ", ".join(sorted({node_of(worker) for worker, task in claimed.items() if task == name}))
        reason = f"what it has done is in the memory of {nodes}, and other tasks come first there"
        waits = Unwritten(reason=reason, retry_at=at, cause="", worker="")
        state = state.with_changed(name, unwritten=waits)
    return _reconfigure(state, at, why, solve) if in_vain else found


def _reconfigure(state: State, at: datetime, why: str, solve: Solve) -> Reconfiguration:
    if not has_question(state):
        problem = build_problem(state, at)
        return _carried_out(state, at, why, problem, *solve(problem))
    ranked = ranking(state, at, solve)
    for choice in ranked.choices:
        try:
            found = _carried_out(choice.state, at, why, choice.problem, choice.solution, choice.alternatives)
        except NoRoom:
            continue  # the task needs a slow worker at a place where another task has to be
        return replace(found, slow=ranked.logged(choice))
    # A slow worker is kept for the task that has it, and another task needs its place. If slow workers count as
    # healthy, all workers are for all tasks.
    whole = forget_slowness(state, state.slow)
    problem = build_problem(whole, at)
    return _carried_out(whole, at, why, problem, *solve(problem))


def _carried_out(
    state: State, at: datetime, why: str, problem: Problem, solution: Solution, alternatives: list[Solution]
) -> Reconfiguration:
    """Return what follows from a solution, with workers for all tasks that it changes."""
    problems = {task.name: task for task in problem.tasks}
    touched = [
        task.model_copy(update={"pool": problems[task.name].pool})
        for task in wanting(state)
        if touches(problems[task.name], solution.assignment[task.name])
    ]
    placed = _place(state, touched, problem, solution)
    proposed = [_change(state, task, solution.assignment[task.name], placed[task.name], why) for task in touched]
    changes = [change for change in proposed if change is not None]
    starved = called(state, at)
    queued = {
        task.name: _own_reason(task) or queued_reason(problems[task.name], problem, solution, starved)
        for task in wanting(state)
        if solution.assignment[task.name] == 0
    }
    return Reconfiguration(changes, queued, problem, solution, alternatives, unlogged_tables(state, problem))


def _change(state: State, task: Task, count: int, placed: Placed, why: str) -> TaskChange | None:
    """Return the change that gives the task its count; None for a task that has no worker and gets none."""
    counts = f"{len(task.members)} -> {count} workers" if count != len(task.members) else f"{count} workers as before"
    reason = f"{why}; {counts}{_about_slow(state, task, placed)}"
    if count == 0:
        return leave(state, task, "pause", reason) if task.members or task.live_owners else None
    if placed.crossing:
        reason = f"{reason}; {placed.crossing} tensor groups span nodes: no node has room for a whole one"
    return move(state, task, placed.workers, reason)


def _about_slow(state: State, task: Task, placed: Placed) -> str:
    """Return what becomes of slow workers of the task, in words."""
    mine, dealt = lent_workers(state, task), state.arrangement is not None and task.name in state.arrangement.dealt
    texts = [f"{w} is {slowdown_of(state, w):.3g} x slower and left out" for w in taken_members(state, task)]
    texts += [f"{w} is {mine[w]:.3g} x slower and used" for w in placed.workers if w in mine]
    texts += ["micro-batches are dealt anew"] if dealt else []
    return "".join(f"; {text}" for text in texts)


def _own_reason(task: Task) -> str:
    """Return why a task has no worker although there may be some: it takes no newcomers, or waits for its operator."""
    if task.needs_operator:
        return f"waits for its operator: {task.needs_operator}; `unicron resume {task.name}` tries it again"
    if task.unwritten is not None:
        return f"waits for its storage: {task.unwritten.reason}"
    if not task.closed:
        return ""
    return f"its new processes are not what it has trained with; stop and resume it to go on with them: {task.closed}"


def worker_order(state: State, task: Task, planned: Mapping[str, str] | None = None) -> list[str]:
    """Return the usable workers planned for the task, owners of its state first, each group in rank order.

    An owner that a plan in progress has given to another task is left out. ``planned``: see ``planned_workers``.
    """
    of = planned_workers(state.tasks.values()) if planned is None else planned
    usable = usable_workers(state.nodes)
    kept = [w for w in task.live_owners if of.get(w, task.name) == task.name]
    return [w for w in (*kept, *without(task.members, kept)) if w in usable]


def planned_workers(tasks: Iterable[Task]) -> dict[str, str]:
    """Return the task for which each worker is planned."""
    return {worker: task.name for task in tasks for worker in task.members}


def same_workers(state: State, task: Task) -> list[str]:
    """Return the workers of a task that keeps its count, in rank order: for a retry or a restart in place.

    These are the planned workers. If none of them has the state, an owner that was to be released takes the place of
    one.
    """
    members = [worker for worker in task.members if state.usable(worker)]
    if task.replica_size > 1:
        return members
    kept = [worker for worker in task.live_owners if worker in members]
    if not kept:
        return worker_order(state, task)[: len(members)]
    return [*kept, *without(members, kept)]


def _place(state: State, touched: list[Task], problem: Problem, solution: Solution) -> dict[str, Placed]:
    """Return the workers of the touched tasks, pool by pool."""
    if not touched:
        return {}  # nothing is looked up for a pool without requests, as where a node joins that no task needs
    names = {task.name for task in touched}
    free = _free(state, names)
    planned = planned_workers(touched)
    lent = state.arrangement.used if state.arrangement is not None else {}
    given = {*lent, *(worker for workers in free.values() for worker in workers)}
    busy = set[str]().union(*(given.intersection(task.occupied) for task in state.tasks.values()))
    claimed = claimed_workers(state)
    placed: dict[str, Placed] = {}
    for pool in problem.pools or [""]:
        room = {node: workers for node, workers in free.items() if pool in ("", state.nodes[node].hardware)}
        within = {worker for workers in room.values() for worker in workers}
        mine = [task for task in touched if not problem.pools or task.pool == pool]
        reserved = {task.name: _reserved(state, task, pool) for task in mine}
        slow = {task.name: _slow(state, task, pool) for task in mine}
        layouts = {task.name: layout_of(state, task, solution.assignment[task.name]) for task in mine}
        requests = [
            PlacementRequest(
                name=task.name,
                count=solution.assignment[task.name],
                tensor=layouts[task.name].tensor,
                pipeline=layouts[task.name].pipeline,
                keep=[
                    w
                    for w in _staying(state, task, solution.assignment[task.name], planned)
                    if (w in within or w in reserved[task.name] or w in slow[task.name])
                    and claimed.get(w, task.name) == task.name
                ],
                reserved=reserved[task.name],
                owners=frozenset(task.live_owners),
                ranks=task.members or tuple(home_workers(state, task)),
                slow=slow[task.name],
            )
            for task in mine
        ]
        placed |= place(requests, state.nodes, room, busy, state.incidents)
    return placed


def _staying(state: State, task: Task, count: int, planned: Mapping[str, str]) -> list[str]:
    """Return the workers that a task keeps or gets back before any others; some on each node of those it gets back.

    Args:
        state: the cluster.
        task: the task.
        count: how many workers it gets.
        planned: see ``planned_workers``.
    """
    if home := home_workers(state, task):
        if task.replica_size > 1:
            return home
        before = Counter[str]()
        turns = {}
        for worker in home:
            turns[worker] = before[node_of(worker)]
            before[node_of(worker)] += 1
        chosen = set(sorted(home, key=turns.__getitem__)[:count])
        return [worker for worker in home if worker in chosen]
    return staying_workers(state, task) if task.closed else worker_order(state, task, planned)


def _reserved(state: State, task: Task, pool: str) -> frozenset[str]:
    """Return the task's workers on cordoned nodes of a pool."""
    taken = set(taken_members(state, task))
    found = [worker for worker in reserved_workers(state, task) if worker not in taken]
    return frozenset(w for w in found if pool in ("", state.nodes[node_of(w)].hardware))


def _slow(state: State, task: Task, pool: str) -> dict[str, float]:
    """Return the slow workers of a pool that the task, and no other, may have, with their slowdowns."""
    mine = lent_workers(state, task)
    return {w: slowdown for w, slowdown in mine.items() if pool in ("", state.nodes[node_of(w)].hardware)}


def _free(state: State, names: Collection[str]) -> dict[str, list[str]]:
    """Return, by node, the workers that the named tasks may have: those that no other task keeps."""
    others = [task.members for task in state.tasks.values() if task.name not in names]
    lent = state.arrangement.used if state.arrangement is not None else {}  # used ones: see their tasks' requests
    free = open_workers(state.nodes).difference(*others, withheld_workers(state), lent)
    numbers = Counter(map(node_of, free))
    return {
        name: list(node.workers) if number == len(node.workers) else [w for w in node.workers if w in free]
        for name, node in state.nodes.items()  # in an order that does not depend on that of a set
        if (number := numbers.get(name))
    }
