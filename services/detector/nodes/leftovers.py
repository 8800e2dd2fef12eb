"""Processes that a node should not have, and the requests to end them. Pure.

Two kinds: the processes of a node that returns, which have survived its absence (``of_returned``), and processes on
workers that no plan names any more (``find``, for every heartbeat). The transition service releases the workers that a
task gives up. But the transition service sends nothing to a node that counts as lost, and a release may time out. The
process would then occupy its worker for ever, and train a generation of which nothing counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from shared.messages.signals import Heartbeat, WorkerStatus

CLEAN_INTERVAL_S = 1.0
"""Pause between two requests to a node to end ranks that it should not have."""

LEFTOVER_S = 5.0
"""How long heartbeats must report such a process before its end is requested. A release takes milliseconds, and a rank
that has finished its task has 5 s to leave (``services.agent.ranks.fork_server.FINISH_GRACE_S``)."""


@dataclass(frozen=True, slots=True)
class Clean:
    """A request to a node: end the ranks of ``task`` on ``workers``, which the node should not have.

    ``generation``: the newest one that the node's agent can have seen, so that the agent accepts the request.
    ``copies``: whether to delete its copies in memory, too (``kept_copies.py``).
    """

    node: str
    task: str
    generation: int
    workers: list[str]
    copies: bool = False


def of_returned(heartbeat: Heartbeat) -> dict[str, list[str]]:
    """Return task -> workers of all processes of a node that has returned: they survived its absence."""
    return _by_task(heartbeat.workers)


def requests(state: DetectorState, node: MonitoredNode, stale: Mapping[str, list[str]], now: datetime) -> list[Clean]:
    """Return the requests to end processes of tasks on a node's workers; none if the node was asked a moment ago."""
    due = node.cleaned_at is None or (now - node.cleaned_at).total_seconds() >= CLEAN_INTERVAL_S
    if not stale or not due:
        return []
    node.cleaned_at = now
    found = []
    for name, workers in stale.items():
        # The generation of the newest plan would not do: a pause has none, and the node may have seen one before the
        # pause.
        found.append(Clean(node.name, name, state.highest_generation(name), workers))
    return found


def find(state: DetectorState, node: MonitoredNode, now: datetime) -> dict[str, list[str]]:
    """Return task -> workers of a node, which is not lost, whose process is left over.

    Args:
        state: the detector's.
        node: has just sent a heartbeat.
        now: when the heartbeat was received.
    """
    assert node.heartbeat is not None
    left = [s for s in node.heartbeat.workers if s.task is not None and _is_leftover(state, s.task, s.worker)]
    if not left:
        node.leftover_since = {}
        return {}
    node.leftover_since = {status.worker: node.leftover_since.get(status.worker, now) for status in left}
    return _by_task(s for s in left if (now - node.leftover_since[s.worker]).total_seconds() >= LEFTOVER_S)


def _by_task(statuses: Iterable[WorkerStatus]) -> dict[str, list[str]]:
    """Return task -> workers, for the workers that have a process."""
    found: dict[str, list[str]] = {}
    for status in statuses:
        if status.task is not None:
            found.setdefault(status.task, []).append(status.worker)
    return found


def _is_leftover(state: DetectorState, name: str, worker: str) -> bool:
    """Return whether a worker's process is of a task that has neither a plan nor a generation with the worker.

    A task that the log does not know, as after the restore of an old backup, is left to the operator.
    """
    task = state.tasks.get(name)
    if task is None:
        return name in state.ended
    return not task.unanswered and worker not in task.concerned()
