"""The planner's timers: a timer that matters is an event, which the service appends when its time has come. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from services.planner.decide import SERVICE
from services.planner.state.admission import due
from services.planner.state.cluster import State, node_of
from shared.events.union import TaskResultUnwritten, TaskStarving, WorkerSlowed, derived_id


class Timer(NamedTuple):
    """An event that is to be appended at a time."""

    at: datetime
    event: TaskStarving | TaskResultUnwritten | WorkerSlowed


def next_timer(state: State) -> Timer | None:
    """Return the timer that comes first; None if none is set. Its event's id follows from what has set it."""
    timers = [*_waits(state), *_tries(state), *_trials(state)]
    return min(timers, key=lambda timer: timer.at, default=None)


def _waits(state: State) -> list[Timer]:
    """Return the timer of the task that starves first."""
    return [
        Timer(
            first.at,
            TaskStarving(
                event_id=derived_id(first.cause, SERVICE, f"starving/{first.task}"),
                occurred_at=first.at,
                task=first.task,
                since=first.since,
            ),
        )
        for first in due(state)[:1]
    ]


def _tries(state: State) -> list[Timer]:
    """Return the timers of the tasks that are to try again to write their result, by name."""
    return [
        Timer(
            task.unwritten.retry_at,
            TaskResultUnwritten(
                event_id=derived_id(task.unwritten.cause, SERVICE, "tries-again"),
                occurred_at=task.unwritten.retry_at,
                task=name,
                generation=task.generation,
                step=task.step,
                worker=task.unwritten.worker,
                reason=task.unwritten.reason,
                retry_at=task.unwritten.retry_at,
                ended=True,
            ),
        )
        for name, task in sorted(state.tasks.items())
        if task.unwritten is not None and task.life == "active"
    ]


def _trials(state: State) -> list[Timer]:
    """Return the timers of the workers on trial, by name.

    The event is that of the trial's end (``slow_workers.py``).
    """
    return [
        Timer(
            slow.trial.ends_at,
            WorkerSlowed(
                event_id=derived_id(slow.trial.cause, SERVICE, "trial-ended"),
                occurred_at=slow.trial.ends_at,
                node=node_of(worker),
                worker=worker,
                slowdown=1.0,
                task=slow.trial.task,
                generation=slow.trial.generation,
                ends=slow.trial.cause,
            ),
        )
        for worker, slow in sorted(state.slow.items())
        if slow.trial is not None
    ]
