"""Copies in memory that nodes keep for tasks without a process there: which are not needed any more. Pure.

The copies of a task may be all that there is of its newest steps. So a node deletes none by itself. The node reports
which copies it keeps, and is asked to delete those of tasks that are over, whether they ended while its agent was there
or not.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from services.detector.nodes.leftovers import Clean
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.task import MonitoredTask

ASKED_EVERY_S = 10.0
"""Pause between two requests to a node about the copies of one task: deleting them takes a second at most."""

LINGER_S = 600.0
"""How long the copies of a task stay that trains on other nodes, or that the log does not know. On the other nodes the
task has copies within minutes, and no plan can come back to a task that the log does not know."""

FAILED_S = 86_400.0
"""How long the copies of a task stay that has failed, or that was stopped without its newest state being saved: as long
as a failed task is shown as one that needs its operator."""


def until(ended_at: datetime) -> datetime:
    """Return how long the copies of a task stay that has ended without its newest state being durable, as a time."""
    return ended_at + timedelta(seconds=FAILED_S)


def requests(state: DetectorState, node: MonitoredNode, now: datetime) -> list[Clean]:
    """Return the requests to delete copies that a node keeps in vain.

    Args:
        state: the detector's.
        node: has just sent a heartbeat.
        now: when the heartbeat was received.
    """
    assert node.heartbeat is not None
    kept = [copies.task for copies in node.heartbeat.copies]
    node.unneeded_since = {
        task: node.unneeded_since.get(task, now) for task in kept if _may_linger(state, node.name, task)
    }
    node.copies_asked_at = {task: at for task, at in node.copies_asked_at.items() if task in kept}
    over = [task for task in kept if _is_over(state, task, now) or _has_lingered(node, task, now)]
    due = [task for task in over if _is_due(node, task, now)]
    node.copies_asked_at |= dict.fromkeys(due, now)
    return [Clean(node.name, task, state.highest_generation(task), [], copies=True) for task in due]


def _is_over(state: DetectorState, name: str, now: datetime) -> bool:
    """Return whether no process will ever need the copies of a task: it has ended, or its state is saved."""
    ended = state.ended.get(name)
    if ended is not None:
        return ended.copies_until is None or now >= ended.copies_until
    task = state.tasks.get(name)
    return task is not None and not task.ended and task.is_saved and _is_settled(task) and not task.members


def _may_linger(state: DetectorState, node: str, name: str) -> bool:
    """Return whether a task trains only on other nodes, or is unknown to the log."""
    task = state.tasks.get(name)
    if task is None:
        return name not in state.ended
    return bool(task.members) and _is_settled(task) and not task.workers_on(node)


def _is_settled(task: MonitoredTask) -> bool:
    return task.change is None and not task.unanswered


def _has_lingered(node: MonitoredNode, task: str, now: datetime) -> bool:
    since = node.unneeded_since.get(task)
    return since is not None and (now - since).total_seconds() >= LINGER_S


def _is_due(node: MonitoredNode, task: str, now: datetime) -> bool:
    asked_at = node.copies_asked_at.get(task)
    return asked_at is None or (now - asked_at).total_seconds() >= ASKED_EVERY_S
