"""What follows from the reports of monitors from outside (``node.reported``): a drain, an isolation, or nothing. Pure.

A warning has its node drained, an error has it isolated until an operator returns it. Nothing follows for now where the
source has taken as many nodes as it may (``state/reports.py``), or where a running task would have fewer workers than
it needs. The second counts no longer once a stated deadline is near: the node goes away then in any case, and a drain
lets tasks save what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self

from services.detector.incidents.faults import METHOD, SERVICE
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.reports import Report, most, source_of
from services.detector.state.task import MonitoredTask
from shared.events.evidence import Evidence
from shared.events.severities import SEVERITY, ErrorKind
from shared.events.union import ErrorDetected, Event, NodeDraining, NodeReported, NodeReportHeld, derived_id


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What the limits of reports are reckoned from, the same for all reports until one of them takes a node.

    Attributes:
        nodes: how many have not left.
        left: kind -> workers on nodes that take work.
        running: kind -> the running tasks with workers of the kind. A task that waits needs none now.
        used: nodes with workers of a running task.
    """

    nodes: int
    left: dict[str, int]
    running: dict[str, list[MonitoredTask]]
    used: frozenset[str]

    @classmethod
    def of(cls, state: DetectorState) -> Self:
        """Return that of the present state."""
        left: dict[str, int] = {}
        for node in state.nodes.values():
            if state.is_open(node):
                left[node.hardware] = left.get(node.hardware, 0) + node.workers
        running: dict[str, list[MonitoredTask]] = {}
        used: set[str] = set()
        for task in state.tasks.values():
            nodes = set() if task.ended else {worker.rpartition("/")[0] for worker in task.concerned()}
            used |= nodes
            for kind in {state.nodes[name].hardware for name in nodes if name in state.nodes}:
                running.setdefault(kind, []).append(task)
        return cls(sum(not node.left for node in state.nodes.values()), left, running, frozenset(used))

    def short(self, state: DetectorState, node: MonitoredNode) -> str:
        """Return that running tasks would lack workers without the node, in words; empty if none would."""
        running = self.running.get(node.hardware, []) if node.name in self.used else []
        left = self.left.get(node.hardware, 0) - (node.workers if state.is_open(node) else 0)
        needed = sum(task.min_workers for task in running)
        if needed <= left:
            return ""
        names = ", ".join(sorted(task.name for task in running))
        return f"without it {left} workers would be left, and {names} needs at least {needed}"


JUDGED_EVERY_S = 1.0
"""How often reports are looked at on which nothing follows. One that is new is looked at with the next tick."""


def answers(state: DetectorState, drain_timeout_s: float, now: datetime) -> Iterator[Event]:
    """Yield what follows from the reports now. Each event has to be folded before the next one is asked for.

    ``drain_timeout_s``: how long tasks may take to move away, and again to save their state, seconds.
    """
    reports = state.reports
    if not reports.is_due(now, JUDGED_EVERY_S):
        return
    # The cluster takes a look at all nodes and tasks, and most of the time no report asks for that.
    cluster: _Cluster | None = None
    for name, known in list(reports.known.items()):
        node = state.nodes.get(name)
        for report in list(known.values()):
            if node is not None and _is_due(state, node, report, now):
                cluster = cluster or _Cluster.of(state)
                for event in _answer(state, cluster, node, report, drain_timeout_s, now):
                    yield event
                    cluster = cluster if isinstance(event, NodeReportHeld) else None


def _is_due(state: DetectorState, node: MonitoredNode, report: Report, now: datetime) -> bool:
    """Return whether something may follow from a report: its node is in use, and nothing has followed yet."""
    if report.settled or now >= report.event.expires_at:
        return False
    if not node.present or node.name in state.isolated or node.name in state.condemned:
        return False
    return report.event.severity == "error" or node.draining is None


def _answer(
    state: DetectorState, cluster: _Cluster, node: MonitoredNode, report: Report, drain_timeout_s: float, now: datetime
) -> Iterator[Event]:
    event = report.event
    left_s = (event.deadline_at - now).total_seconds() if event.deadline_at is not None else None
    held = _held(state, cluster, node, event, now, is_near=left_s is not None and left_s <= drain_timeout_s)
    if held is None:
        timeout_s = drain_timeout_s if left_s is None else min(drain_timeout_s, max(0.0, left_s / 2))
        is_error = event.severity == "error"
        yield _isolated(state, node, event, now) if is_error else _draining(event, timeout_s, now)
    elif held.why not in report.held:
        yield held


def _held(
    state: DetectorState, cluster: _Cluster, node: MonitoredNode, event: NodeReported, now: datetime, *, is_near: bool
) -> NodeReportHeld | None:
    """Return why nothing follows from a report for now; None: something does. ``is_near``: its deadline is."""
    source = source_of(event.report)
    if not state.reports.may_take(source, node.name, cluster.nodes, now):
        taken = f"{most(cluster.nodes)} of {cluster.nodes} nodes"
        text = f"{source} has taken {taken} out of use within an hour, the most that it may"
        return _hold(event, "budget", text, now)
    if not is_near and (short := cluster.short(state, node)):
        return _hold(event, "minimum", short, now)
    return None


def _hold(event: NodeReported, why: Literal["budget", "minimum"], text: str, now: datetime) -> NodeReportHeld:
    return NodeReportHeld(
        event_id=derived_id(event.event_id, SERVICE, why),
        occurred_at=now,
        node=event.node,
        report=event.report,
        why=why,
        reason=text,
    )


def _draining(event: NodeReported, timeout_s: float, now: datetime) -> NodeDraining:
    return NodeDraining(
        event_id=derived_id(event.event_id, SERVICE, "draining"),
        occurred_at=now,
        node=event.node,
        by="user",
        timeout_s=timeout_s,
        reason=f"{event.actor} reports {event.key}: {event.reason}",
        actor=event.actor,
        report=event.report,
    )


def _isolated(state: DetectorState, node: MonitoredNode, event: NodeReported, now: datetime) -> ErrorDetected:
    event_id = derived_id(event.event_id, SERVICE, "isolated")
    evidence = Evidence(incarnation=node.incarnation, tasks=state.lost_ranks(node), report=event.report)
    return ErrorDetected(
        event_id=event_id,
        occurred_at=min(event.occurred_at, now),
        incident=event_id,
        kind=ErrorKind.REPORTED,
        severity=SEVERITY[ErrorKind.REPORTED],
        method=METHOD[ErrorKind.REPORTED],
        detected_at=now,
        node=event.node,
        evidence=evidence.mapping(source=event.actor, key=event.key, reason=event.reason, reported=event.evidence),
    )
