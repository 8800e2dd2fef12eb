"""Admission: which tasks get workers in any case, which tasks wait and why, and when a wait becomes too long.

Each task is admitted, in this order, if the least count at which it runs still fits:

1. Tasks that have starved, the longest waiting first. These are the tasks that still wait, and tasks that got workers
   by starving, during their turn. A turn lasts as long as a task had to wait, so that the task is not paused for the
   next starving task at once.
2. Running tasks, heavy ones first; then waiting ones, heavy ones first. Where pausing is allowed, a heavy task that
   waits comes before a lighter one that runs.

A task that loses its workers waits again, so tasks that cannot run together take turns of ``starvation_s``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from services.planner.state.cluster import State, Task, Wait
from shared.events.plans import Problem, Solution, TaskProblem
from shared.planning.waf import waf_flop_per_s


class Due(NamedTuple):
    """A wait that becomes too long at time ``at``.

    ``cause``: id of the event from which the id of the ``task.starving`` event is derived. Each wait has another one.
    """

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
    """Return the names of the admitted tasks. The other tasks get what the admitted ones leave, if that is enough.

    Args:
        tasks: all tasks that want workers.
        room: workers of each pool; of the only pool under the empty name.
        called: tasks that have starved, and when their wait began (see ``called``).
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
    """Return the tasks that have starved and those whose turn it is, and when their wait began."""
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
    """Return when the waits of tasks become too long, the earliest first.

    A task that has starved and still waits may wait for the turns of others. It starves again at the end of the next
    turn.
    """
    turn = starvation(state)
    if turn is None:
        return []
    waiting = [(task, wait) for task in state.tasks.values() if (wait := present_wait(task)) is not None]
    turn_ends = _turn_ends(state, turn) if waiting else []
    found = []
    for task, wait in waiting:
        if wait.called_at is None:
            found.append(Due(wait.since + turn, task.name, wait.since, wait.cause))
            continue
        ends = [end for end in turn_ends if end > wait.called_at]
        if ends:
            found.append(Due(min(ends), task.name, wait.since, wait.cause))
    return sorted(found, key=lambda d: (d.at, d.since, d.task))


def starvation(state: State) -> timedelta | None:
    """Return how long a task waits before it starves; None if tasks never starve."""
    seconds = state.parameter("starvation_s")
    return timedelta(seconds=seconds) if seconds > 0.0 else None


def _turn_ends(state: State, turn: timedelta) -> list[datetime]:
    """Return the times at which the turns of running tasks end."""
    running = (task for task in state.tasks.values() if task.life == "active" and task.members)
    return [t.wait.ended_at + turn for t in running if t.wait is not None and t.wait.ended_at is not None]


def present_wait(task: Task | None) -> Wait | None:
    """Return the task's wait for workers; None if it does not wait, or waits for its operator."""
    if task is None or task.life != "active" or task.wait is None or task.wait.ended_at is not None:
        return None
    if task.needs_operator or task.unwritten is not None:
        return None
    return task.wait


def queued_reason(task: TaskProblem, problem: Problem, solution: Solution, called: Collection[str]) -> str:
    """Return why the task gets no worker, in words.

    Args:
        task: the task.
        problem: the problem that contains the task.
        solution: the answer to the problem.
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
