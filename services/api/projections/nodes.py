"""The fold's part for nodes: joining, leaving, and loss or isolation by an error."""

from __future__ import annotations

from services.api.views import NodeView, Views
from shared.events import ErrorDetected, NodeJoined, NodeLeft, Recorded
from shared.severities import ErrorKind, Severity


def joined(views: Views, recorded: Recorded, event: NodeJoined) -> None:
    """Add a node, or set one that joins again to ready; it keeps its place in the list."""
    known = views.nodes.get(event.node)
    views.nodes[event.node] = NodeView(
        name=event.node,
        position=known.position if known else recorded.position,
        incarnation=event.incarnation,
        agent_pid=event.agent_pid,
        domain=event.domain,
        workers=event.workers,
        joined_at=recorded.recorded_at,
    )


def left(views: Views, event: NodeLeft) -> None:
    """Mark a node as left, unless another incarnation has joined since."""
    node = views.nodes.get(event.node)
    if node is not None and node.incarnation == event.incarnation:
        views.nodes[node.name] = node.model_copy(update={"state": "left", "reason": event.reason})


def failed(views: Views, event: ErrorDetected) -> None:
    """Mark the node of a SEV1 error as lost or isolated."""
    node = views.nodes.get(event.node or "")
    if node is not None and event.severity is Severity.SEV1:
        lost = event.kind is ErrorKind.NODE_LOST
        reason = f"{event.kind.value} ({event.method.value}), incident {event.incident}"
        state = "lost" if lost else "isolated"
        views.nodes[node.name] = node.model_copy(update={"state": state, "reason": reason})
