"""The fold's part for nodes: joining, leaving, loss or isolation by an error, and what users want of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Severity
from shared.events.union import (
    ErrorDetected,
    NodeAdopted,
    NodeCordoned,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeMeasured,
    NodeReported,
    NodeReportHeld,
    NodeReturned,
    Recorded,
)
from shared.model import filled
from shared.projections.observed import forget_slowness
from shared.views.documents import NodeReport, NodeState, NodeView, Views

AGENT_LIVES = frozenset({NodeState.READY, NodeState.CORDONED, NodeState.DRAINING, NodeState.DRAINED})
"""States of nodes that take part in the cluster."""

AWAY = frozenset({NodeState.LOST, NodeState.LEFT})
"""States of nodes without an agent."""


def joined(views: Views, recorded: Recorded, event: NodeJoined | NodeMeasured) -> None:
    """Add a node, or set one that joins again to ready or cordoned; it keeps its place in the list."""
    known = views.nodes.get(event.node)
    cordoned = known is not None and known.cordoned
    if known is not None:
        forget_slowness(views, known, event.occurred_at, "the node joined anew")
    views.nodes[event.node] = filled(
        NodeView,
        event,
        name=event.node,
        position=known.position if known else recorded.position,
        version=recorded.stream_version,
        state=NodeState.CORDONED if cordoned else NodeState.READY,
        cordoned=cordoned,
        reports=known.reports if known else [],
        joined_at=recorded.recorded_at,
        span=known.span if known else "",
        allocated_since=known.allocated_since if known else None,
        allocated_worker_s=known.allocated_worker_s if known else 0.0,
    )


def measured(views: Views, recorded: Recorded, event: NodeMeasured) -> None:
    """Note what a preflight has come to. A node that it keeps from joining is shown as isolated, with its new agent."""
    known = views.nodes.get(event.node)
    refused = event.verdict == "refused"
    slow = event.reason if refused or event.verdict == "slow" else ""
    shown: dict[str, Any] = {}
    if refused and known is None:
        joined(views, recorded, event)
    if refused and (known is None or known.state in AWAY or (known.state is NodeState.ISOLATED and known.preflight)):
        shown = {"state": NodeState.ISOLATED, "reason": ""}
        shown |= {"incarnation": event.incarnation, "agent_pid": event.agent_pid}
    if event.node in views.nodes:
        _change(views, event.node, preflight=slow, **shown)


def adopted(views: Views, event: NodeAdopted) -> None:
    """Give a node its new agent; all else stays."""
    node = views.nodes.get(event.node)
    if node is not None and node.incarnation == event.predecessor:
        _change(views, event.node, incarnation=event.incarnation, agent_pid=event.agent_pid)


def left(views: Views, event: NodeLeft) -> None:
    """Mark a node as left, unless another incarnation has joined since."""
    node = views.nodes.get(event.node)
    if node is not None and node.incarnation == event.incarnation:
        _change(views, event.node, state=NodeState.LEFT, reason=event.reason)
        views.nodes[event.node] = forget_slowness(views, views.nodes[event.node], event.occurred_at, "the node left")


def cordoned(views: Views, event: NodeCordoned) -> None:
    """Mark a node as cordoned; what it does otherwise stays."""
    node = views.nodes.get(event.node)
    if node is not None:
        shown = {"state": NodeState.CORDONED, "reason": event.reason} if node.state is NodeState.READY else {}
        _change(views, event.node, cordoned=True, **shown)


def draining(views: Views, event: NodeDraining) -> None:
    """Mark a node as draining. A node that is drained already stays so, and is not charged for again."""
    node = views.nodes.get(event.node)
    if node is None:
        return
    drains = node.state in AGENT_LIVES and node.state is not NodeState.DRAINED
    shown = {"state": NodeState.DRAINING, "reason": event.reason} if drains else {}
    reports = _answered(node, event.report, "drained")
    _change(views, event.node, cordoned=node.cordoned or event.by == "user", reports=reports, **shown)


def drained(views: Views, event: NodeDrained) -> None:
    """Mark a draining node as drained."""
    node = views.nodes.get(event.node)
    if node is not None and node.state is NodeState.DRAINING:
        _change(views, event.node, state=NodeState.DRAINED)


def returned(views: Views, event: NodeReturned) -> None:
    """Mark a node as ready, unless its agent is away."""
    node = views.nodes.get(event.node)
    if node is not None and node.incarnation == event.incarnation:
        shown = {} if node.state in AWAY else {"state": NodeState.READY, "reason": ""}
        _change(views, event.node, cordoned=False, kept_out=False, preflight="", **shown)
    if node is not None and event.actor != "detector":
        overruled = [one.model_copy(update={"answer": "overruled", "held": ""}) for one in node.reports]
        _change(views, event.node, reports=overruled)


def reported(views: Views, event: NodeReported) -> None:
    """Note what a monitor reports; an error that it has reported as a warning before counts anew."""
    if (node := views.nodes.get(event.node)) is not None:
        _change(views, event.node, reports=with_report(node.reports, event))


def with_report(reports: Iterable[NodeReport], event: NodeReported) -> list[NodeReport]:
    """Return a node's reports with a new one, or with one renewed, the newest at the end; none that have expired."""
    live = {one.report: one for one in reports if one.expires_at > event.occurred_at}
    known = live.pop(event.report, None)
    same = known is not None and (known.severity, event.severity) != ("warning", "error")
    kept = known.model_dump(include={"answer", "held"}) if known is not None and same else {}
    return [*live.values(), filled(NodeReport, event, reported_at=event.occurred_at, **kept)]


def report_held(views: Views, event: NodeReportHeld) -> None:
    """Note why nothing follows from a report."""
    if (node := views.nodes.get(event.node)) is not None:
        _change(views, event.node, reports=_with(node, event.report, held=event.reason))


def _answered(node: NodeView, report: str, answer: Literal["drained", "isolated"]) -> list[NodeReport]:
    """Return the reports of a node after one of them had it drained or isolated."""
    return _with(node, report, answer=answer, held="")


def _with(node: NodeView, report: str, **changes: str) -> list[NodeReport]:
    return [one.model_copy(update=changes) if report == one.report else one for one in node.reports]


def failed(views: Views, event: ErrorDetected) -> None:
    """Mark the node of a SEV1 error as lost or isolated. An escalation has the kind of the error before."""
    if event.node is not None and event.node in views.nodes and event.severity is Severity.SEV1:
        lost = event.kind is ErrorKind.NODE_LOST and event.escalates is None
        evidence = Evidence.read(event.evidence)
        reason = f"{_repeated(event, evidence)}{event.kind.value} ({event.method.value}), incident {event.incident}"
        kept_out = views.nodes[event.node].kept_out or evidence.rule in ("lemon", "pair")
        kept_out |= bool(evidence.report)
        reports = _answered(views.nodes[event.node], evidence.report, "isolated")
        state = NodeState.LOST if lost else NodeState.ISOLATED
        _change(views, event.node, state=state, reason=reason, kept_out=kept_out, reports=reports)
        if lost:
            node = views.nodes[event.node]
            views.nodes[event.node] = forget_slowness(views, node, event.occurred_at, "the node was lost")


def _repeated(event: ErrorDetected, evidence: Evidence) -> str:
    """Return which repetition isolated the node, in words; empty if none did."""
    used = event.evidence.get("repetition")
    if evidence.report:
        said = (event.evidence.get(name, "") for name in ("source", "key", "reason"))
        return "{} reports {}: {}; ".format(*said)
    if evidence.rule == "pair":
        return "its link broke too often; "
    if not evidence.rule or not isinstance(used, dict):
        return ""
    if evidence.rule == "starts":
        also = ", ".join(used.get("also_failed", []))
        return f"{used.get('cause')} of a process that starts, and nowhere else failed those of {also}; "
    if evidence.rule == "lemon":
        within = f"within {used.get('window_s', 0.0) / 86_400:g} days"
        return f"lemon: {used.get('faults')} faults of its own {within}, {used.get('expected', 0.0):.2g} expected; "
    within = f"within {used.get('window_s', 0.0):g} s"
    return f"{used.get('cause')} {used.get('times')} times on {used.get('place')} {within}; "


def _change(views: Views, name: str, **changes: Any) -> None:
    views.nodes[name] = views.nodes[name].model_copy(update=changes)
