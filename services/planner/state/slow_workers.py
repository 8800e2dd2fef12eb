"""Slow workers in the fold of the log: who is slow, how often that has begun, and who is on trial.

A worker that becomes as fast as its peers again (``worker.slowed`` with slowdown 1.0) is trusted at once if a task has
it and no plan had changed anything because of it. A worker that was left out, or whose task deals its micro-batches by
speed, is on trial first and counts as slow meanwhile: for ``TRIAL_S``, doubled for each further time that it became
slow within ``MEMORY_S``. So a worker that flaps costs the cluster two transitions less and less often. At the end of
the trial the planner's service appends ``worker.slowed`` with ``ends`` (``timers.py``), since a timer that matters is
an event.

A node that is lost, leaves or joins anew has no slow workers: the process that was measured is gone. How often its
workers became slow is remembered all the same. An adopted, drained or returned node keeps its processes or its
hardware, and what is known of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from services.planner.state.cluster import SlowWorker, State, Task, Trial, node_of
from shared.events.union import WorkerSlowed

TRIAL_S = 5.0
"""How long a worker that was left out must have been as fast again before it is trusted, seconds: little beside what
its return and another move would cost. An isolated node proves its links as long (``nodes/isolation.py``)."""

TRIAL_MAX_S = 900.0
"""The longest trial, seconds. An operator looks at a worker that has become slow eight times within an hour."""

MEMORY_S = 3600.0
"""How long it is remembered that a worker became slow. A worker that heats up or shares its host becomes slow many
times."""

FULL_SPEED = 1.0
"""The slowdown of a worker that is as fast as its peers."""


def slow_worker(state: State, event: WorkerSlowed, at: datetime) -> State:
    """Return the state after a worker became slower or as fast again. Events of a node that is gone change nothing."""
    if not state.usable(event.worker):
        return state
    known = state.slow.get(event.worker)
    began = _remembered(known, at)
    if event.slowdown > FULL_SPEED:
        is_new = known is None or known.slowdown == FULL_SPEED or known.trial is not None
        return _with(state, event.worker, SlowWorker(slowdown=event.slowdown, began=(*began, at) if is_new else began))
    if known is None or known.slowdown == FULL_SPEED:
        return state
    if event.ends is not None:
        if known.trial is None or known.trial.cause != event.ends:
            return state  # it became slow again meanwhile
        return _with(state, event.worker, SlowWorker(slowdown=FULL_SPEED, began=began))
    if known.trial is not None:
        return state
    if any(event.worker in task.members and not task.shares for task in state.tasks.values()):
        return _with(state, event.worker, SlowWorker(slowdown=FULL_SPEED, began=began))
    ends_at = at + timedelta(seconds=trial_s(len(began)))
    trial = Trial(ends_at=ends_at, cause=event.event_id, task=event.task, generation=event.generation)
    return _with(state, event.worker, SlowWorker(slowdown=known.slowdown, began=began, trial=trial))


def trial_s(times: int) -> float:
    """Return how long the trial is of a worker that became slow so many times, seconds."""
    return float(min(TRIAL_S * 2 ** max(0, times - 1), TRIAL_MAX_S))


def forget_slowness(state: State, workers: Iterable[str]) -> State:
    """Return the state in which none of these workers is slow. How often they became slow is remembered."""
    found = {worker: state.slow[worker] for worker in workers if worker in state.slow}
    if not found:
        return state
    whole = {worker: SlowWorker(slowdown=FULL_SPEED, began=slow.began) for worker, slow in found.items()}
    return state.model_copy(update={"slow": {**state.slow, **whole}})


def is_answered(state: State, event: WorkerSlowed) -> bool:
    """Return whether an event, which ``state`` contains, calls for a plan: its worker is usable and so fast."""
    known = state.slow.get(event.worker)
    slowdown = known.slowdown if known is not None else FULL_SPEED
    return state.usable(event.worker) and slowdown == event.slowdown


def slowdown_of(state: State, worker: str) -> float:
    """Return by how much a worker is slower than its peers; 1.0 if it is not."""
    known = state.slow.get(worker)
    return known.slowdown if known is not None else FULL_SPEED


def is_slowed(state: State, task: Task) -> bool:
    """Return whether a member of the task is slow."""
    return bool(state.slow) and any(slowdown_of(state, worker) > FULL_SPEED for worker in task.members)


def taken_members(state: State, task: Task) -> list[str]:
    """Return the task's members that the question takes away from the task, in rank order."""
    if state.arrangement is None:
        return []
    used = state.arrangement.used
    return [worker for worker in task.members if used.get(worker, task.name) != task.name]


def lent_workers(state: State, task: Task) -> dict[str, float]:
    """Return the slow workers that the question lets the task have, its own and others, with their slowdowns."""
    if state.arrangement is None:
        return {}
    used = state.arrangement.used
    return {worker: slowdown_of(state, worker) for worker in sorted(used) if used[worker] == task.name}


def hardware_of_worker(state: State, worker: str) -> str:
    """Return the kind of a worker whose node is known."""
    return state.nodes[node_of(worker)].hardware


def _remembered(known: SlowWorker | None, at: datetime) -> tuple[datetime, ...]:
    times = known.began if known is not None else ()
    return tuple(time for time in times if (at - time).total_seconds() <= MEMORY_S)


def _with(state: State, worker: str, slow: SlowWorker) -> State:
    return state.model_copy(update={"slow": {**state.slow, worker: slow}})
