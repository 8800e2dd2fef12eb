"""Tasks that have done all steps and cannot write their result: when their workers go to others, how long. Pure.

A rank reports that it cannot write the result once it has tried in vain for a while and the task's state is kept
without the processes. The workers are then lent to other tasks. The task gets some again, only to write, after a time
that grows with each such wait: each try may take workers from others, and nobody knows beforehand that it will be in
vain. A node that sees its storage return ends the wait.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from services.detector.incidents.faults import SERVICE
from services.detector.state.task import MonitoredTask
from shared.events.union import TaskResultUnwritten, derived_id
from shared.messages.signals import RankCheckpointFailed, RankSignal, StorageReturned

_UNWRITTEN = "result-unwritten"

FIRST_WAIT_S = 120.0
"""The first wait. Chosen: long beside the start of processes, which each try costs, and short beside the time in which
somebody notices that a disk is full and makes room. Whoever has made room that no node sees ends the wait by ``unicron
resume``."""

LONGEST_WAIT_S = 600.0
"""The longest wait. Chosen: a try takes about half a minute, so tries take at most a twentieth of the workers' time."""


def may_lend(task: MonitoredTask) -> bool:
    """Return whether the workers of a task may go to others now: nothing else is being done about it."""
    return task.change is None and not task.unanswered


def wait_s(before: int) -> float:
    """Return for how long a task goes without workers, seconds.

    ``before``: how often it has gone without since it was submitted.
    """
    doubled: float = FIRST_WAIT_S * 2.0 ** min(before, 16)
    return min(LONGEST_WAIT_S, doubled)


def unwritten(task: MonitoredTask, signal: RankCheckpointFailed, now: datetime) -> TaskResultUnwritten:
    """Return the event of a task whose workers go to others until it tries again. There is one in a generation."""
    retry_at = now + timedelta(seconds=wait_s(task.lent))
    return _event(signal, now, _UNWRITTEN, reason=signal.reason, retry_at=retry_at)


def returned(task: MonitoredTask, signal: StorageReturned, now: datetime) -> TaskResultUnwritten | None:
    """Return the event of a task that is to try again now; None if it has not waited since that generation."""
    if _id(signal, _UNWRITTEN) not in task.recorded or signal.generation != task.generation:
        return None
    reason = f"node {signal.node} can write to its storage again"
    return _event(signal, now, "storage-returned", reason=reason, retry_at=min(signal.occurred_at, now), ended=True)


def _id(signal: RankSignal, what: str) -> str:
    return derived_id(f"{signal.task}/{signal.generation}", SERVICE, what)


def _event(signal: RankSignal, now: datetime, what: str, **more: Any) -> TaskResultUnwritten:
    return TaskResultUnwritten(
        event_id=_id(signal, what),
        occurred_at=min(signal.occurred_at, now),
        task=signal.task,
        generation=signal.generation,
        step=signal.step,
        worker=signal.worker,
        **more,
    )
