"""Which tasks are to have workers whatever others would make of them, who waits and why, and when a wait is over.

In this order, each task is admitted if the least count at which it runs still fits:

1. Tasks that have starved, the longest waiting first: those that still wait, and those that got workers by it, for as
   long as they had to wait (their turn), so that one is not paused for the next at once.
2. Running tasks, heavy ones first; then waiting ones, heavy ones first. Where pausing is allowed, a heavy one that
   waits comes before a lighter one that runs.

A task that loses its workers waits in its turn, so tasks that cannot run together take turns of ``starvation_s``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from services.planner.state import State, Task, Wait
from shared.planning.waf import waf_flop_per_s
from shared.plans import Problem, Solution, TaskProblem


class Due(NamedTuple):
    """A wait that becomes too long ``at``. ``cause``: what its event's id is derived from, once for each wait."""

    at: datetime
    task: str
    since: datetime
    cause: str


def admit(
    tasks: Sequence[TaskProblem],
    room: Mapping[str, int],
    called: Mapping[str, datetime] | None = None,
    *,
    allow_pausing: bool = False,
) -> set[str]:
    """Return the names of the tasks that are admitted. What is not gets what these leave, if that is enough.

    Args:
        tasks: all that want workers.
        room: workers of each pool; where there is only one, under the empty name.
        called: tasks that have starved, with the time since when they waited (``called``).
        allow_pausing: whether a running task may give way to a heavier one.
    """
    called = called or {}

    def order(task: TaskProblem) -> tuple[float, bool, float, bool, str]:
        since = called.get(task.name)
        waited = since.timestamp() if since is not None else float("inf")
        queued = task.current == 0
        return waited, queued and not allow_pausing, -task.weight, queued, task.name

    admitted: set[str] = set()
    left = dict(room)
    for task in sorted(tasks, key=order):
        least = least_count(task)
        pool = task.pool if task.pool in left else ""
        if least is not None and least <= left.get(pool, 0):
            admitted.add(task.name)
            left[pool] -= least
    return admitted


def least_count(task: TaskProblem) -> int | None:
    """Return the smallest count at which the task achieves anything; None if there is none."""
    working = (k for k in sorted(task.throughput) if k <= task.maximum and waf_flop_per_s(task, k) > 0.0)
    return next(working, None)


def called(state: State, at: datetime) -> dict[str, datetime]:
    """Return the tasks that have starved and those whose turn it is, with the time since when they waited."""
    turn = starvation(state)
    if turn is None:
        return {}
    return {
        task.name: task.wait.since
        for task in state.tasks.values()
        if task.life == "active"
        and task.wait is not None
        and task.wait.called_at is not None
        and (task.wait.ended_at is None or (task.members and at < task.wait.ended_at + turn))
    }


def due(state: State) -> list[Due]:
    """Return when the waits of tasks become too long, the first one first.

    A task that was called and still waits may wait for others' turns to end: it is called again at the next end.
    """
    turn = starvation(state)
    if turn is None:
        return []
    turn_ends = _turn_ends(state, turn)
    found = []
    for task in state.tasks.values():
        wait = waits(task)
        if wait is None:
            continue
        if wait.called_at is None:
            found.append(Due(wait.since + turn, task.name, wait.since, wait.cause))
            continue
        ends = [end for end in turn_ends if end > wait.called_at]
        if ends:
            found.append(Due(min(ends), task.name, wait.since, wait.cause))
    return sorted(found, key=lambda d: (d.at, d.since, d.task))


def starvation(state: State) -> timedelta | None:
    """Return how long a task waits before it comes first; None: for ever."""
    seconds = state.parameter("starvation_s")
    return timedelta(seconds=seconds) if seconds > 0.0 else None


def _turn_ends(state: State, turn: timedelta) -> list[datetime]:
    running = (task for task in state.tasks.values() if task.life == "active" and task.members)
    return [t.wait.ended_at + turn for t in running if t.wait is not None and t.wait.ended_at is not None]


def waits(task: Task | None) -> Wait | None:
    """Return the task's wait for workers, if it waits."""
    if task is None or task.life != "active" or task.wait is None or task.wait.ended_at is not None:
        return None
    return task.wait


def queued_reason(task: TaskProblem, problem: Problem, solution: Solution, called: Collection[str]) -> str:
    """Return why the task gets no worker.

    Args:
        task: the task.
        problem: the problem it is in.
        solution: the answer.
        called: tasks that have starved.
    """
    workers = problem.pools.get(task.pool, 0) if problem.pools else problem.workers
    kind = f" of kind {task.pool}" if problem.pools else ""
    paused = "paused: " if task.current > 0 else ""
    if task.necessary > max(1, workers):
        return f"{paused}needs at least {task.necessary} workers{kind}; {workers} can be had"
    if not task.throughput:
        return f"{paused}no layout of it runs on {workers} workers{kind}"
    least = least_count(task)
    if least is None:
        return f"{paused}no count from {task.necessary} to {task.maximum} workers{kind} achieves anything"
    before = [
        t for t in problem.tasks if (not problem.pools or t.pool == task.pool) and solution.assignment[t.name] > 0
    ]
    starved = sorted(t.name for t in before if t.name in called)
    heavier = sorted(t.name for t in before if t.weight > task.weight)
    if starved:
        why = f"the {workers} there are go first to {' and '.join(starved)}, after too long a wait"
    elif paused and heavier:
        why = f"heavier tasks come first for the {workers} there are: {' and '.join(heavier)}"
    else:
        why = f"other tasks come first for the {workers} there are"
    return f"{paused}needs at least {least} workers{kind}; {why}"
