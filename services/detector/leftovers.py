"""Processes that no plan names any more: compared with every heartbeat, and ended. Pure.

The transition service releases the workers that a task gives up. It sends nothing to a node that counts as lost, and a
release may time out; the process would then have its worker for ever, and go on training a generation that nothing
counts of.
"""

from __future__ import annotations

from datetime import datetime

from services.detector.state import DetectorState, MonitoredNode
from shared.signals import WorkerStatus

LEFTOVER_S = 5.0
"""For how long heartbeats must report such a process. A release takes milliseconds, and a rank that has finished its
task has 5 s to leave (``services.agent.agent.FINISH_GRACE_S``)."""


def find(state: DetectorState, node: MonitoredNode, now: datetime) -> dict[str, list[str]]:
    """Return task -> workers of a node, which is not lost, whose process is left over.

    Args:
        state: the detector's.
        node: has just sent a heartbeat.
        now: when the heartbeat was received.
    """
    assert node.heartbeat is not None
    left = [status for status in node.heartbeat.workers if _is_leftover(state, status)]
    node.leftover_since = {status.worker: node.leftover_since.get(status.worker, now) for status in left}
    found: dict[str, list[str]] = {}
    for status in left:
        if status.task is not None and (now - node.leftover_since[status.worker]).total_seconds() >= LEFTOVER_S:
            found.setdefault(status.task, []).append(status.worker)
    return found


def _is_leftover(state: DetectorState, status: WorkerStatus) -> bool:
    """Return whether the worker has a process of a task that has neither a plan nor a generation with the worker.

    A task that the log does not know, as after the restore of an old backup, is left to the operator.
    """
    task = state.tasks.get(status.task) if status.task is not None else None
    return task is not None and not task.unanswered and status.worker not in task.concerned()
