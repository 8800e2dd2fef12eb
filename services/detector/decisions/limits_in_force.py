"""The limits by which the detector judges at this moment, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from services.detector.nodes.silence_limits import SilenceLimits
from services.detector.progress import hangs
from services.detector.state import stalls
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.progress_gaps import HangLimit
from services.detector.state.task import MonitoredTask
from shared.bus.messages import MAX_SECONDS
from shared.messages.limits_in_force import HangLimitInForce, NodeLimits, TaskLimits
from shared.messages.signals import WorkerStatus


def of_nodes(state: DetectorState, limits: SilenceLimits, names: Iterable[str], now: datetime) -> list[NodeLimits]:
    """Return the limits of those of the nodes that take part in the cluster.

    Args:
        state: the detector's.
        limits: thresholds.
        names: of the nodes.
        now: the time.
    """
    nodes = [node for name in names if (node := state.nodes.get(name)) is not None and node.present]
    return [_of_node(state, limits, node, now) for node in nodes]


def of_tasks(state: DetectorState, limits: SilenceLimits, names: Iterable[str]) -> list[TaskLimits]:
    """Return the limits of those of the tasks that have not ended."""
    bounds = limits.stalls
    return [
        TaskLimits(
            task=task.name,
            step_s=_of_step_s(state, task, limits),
            first_steps_s=stalls.cold_limit(task.cold_s, bounds).limit_s,
            longest_start_s=task.cold_s,
            between_steps_s=bounds.slow_region_timeout_s,
            hard_s=bounds.hard_s,
        )
        for name in names
        if (task := state.tasks.get(name)) is not None and not task.ended
    ]


def _of_step_s(state: DetectorState, task: MonitoredTask, limits: SilenceLimits) -> float | None:
    """Return the longest limit that a task's ranks have in a micro-batch, wherever they are; None if no rank trains."""
    found = [one[0] for worker in task.members if (one := _of_rank(state, task, worker, limits)) is not None]
    inside = [status.model_copy(update={"phase": "compute"}) for status in found]
    return max((hangs.limit_of(task, status, limits.stalls).limit_s for status in inside), default=None)


def longest_of_tasks(state: DetectorState, limits: SilenceLimits) -> dict[str, float]:
    """Return task -> the longest limit of its ranks, in seconds, of the tasks that train."""
    longest: dict[str, float] = {}
    for task in state.running():
        for worker in task.members:
            found = _of_rank(state, task, worker, limits)
            if found is not None:
                longest[task.name] = max(longest.get(task.name, 0.0), found[1].limit_s)
    return longest


def phi(node: MonitoredNode, now: datetime) -> float:
    """Return how suspicious the silence of a node is."""
    since = node.silent_since
    return node.arrivals.phi(max(0.0, (now - since).total_seconds())) if since is not None else 0.0


def _of_node(state: DetectorState, limits: SilenceLimits, node: MonitoredNode, now: datetime) -> NodeLimits:
    limit, arrivals = limits.of(node), node.arrivals
    silence_s = None if node.heard_at is None else min(max(0.0, (now - node.heard_at).total_seconds()), MAX_SECONDS)
    return NodeLimits(
        node=node.name,
        silence_s=silence_s,
        phi=min(phi(node, now), MAX_SECONDS),
        ask_s=limit.ask_s,
        limit_s=limit.limit_s,
        source=limit.source,
        samples=arrivals.samples,
        median_delay_s=arrivals.median_s if arrivals.samples else None,
        longest_delay_s=arrivals.longest_s if arrivals.samples else None,
        ranks=_of_ranks(state, limits, node),
    )


def _of_ranks(state: DetectorState, limits: SilenceLimits, node: MonitoredNode) -> list[HangLimitInForce]:
    shown = []
    for reported in node.heartbeat.workers if node.heartbeat is not None else ():
        task = state.tasks.get(reported.task) if reported.task is not None else None
        found = _of_rank(state, task, reported.worker, limits) if task is not None else None
        if task is None or found is None:
            continue
        status, limit = found
        shown.append(
            HangLimitInForce(
                worker=status.worker,
                task=task.name,
                rank=task.members[status.worker].rank,
                phase=status.phase,
                age_s=stalls.own_age_s(status),
                limit_s=limit.limit_s,
                source=limit.source,
                quantile_s=limit.quantile_s,
                samples=limit.samples,
            )
        )
    return shown


def _of_rank(
    state: DetectorState, task: MonitoredTask, worker: str, limits: SilenceLimits
) -> tuple[WorkerStatus, HangLimit] | None:
    """Return a rank's status and its limit; None if it does not train in the task's present generation."""
    status = state.status(worker)
    if worker not in task.members or status is None or status.task != task.name:
        return None
    if status.generation != task.generation or status.state != "training":
        return None
    return status, hangs.limit_of(task, status, limits.stalls)
