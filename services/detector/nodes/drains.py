"""Nodes that are drained: when one is empty, and when its tasks have had their time to move away. Pure."""

from __future__ import annotations

from datetime import datetime

from services.detector.incidents.faults import SERVICE
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from shared.events.union import Event, NodeDrained, NodeDraining, derived_id
from shared.messages.admission import Departure


def tasks_on(state: DetectorState, node: str) -> list[str]:
    """Return the tasks that need workers of the node now, sorted."""
    return sorted(task.name for task in state.tasks.values() if task.workers_on(node))


def began(node: MonitoredNode, departure: Departure, now: datetime) -> NodeDraining:
    """Return the event with which a node begins to be drained because its agent is to leave.

    Its id has the time, since a user may return the node meanwhile.
    """
    return NodeDraining(
        event_id=derived_id(f"{node.joined}/{now.isoformat()}", SERVICE, "draining"),
        occurred_at=now,
        node=node.name,
        by="agent",
        timeout_s=departure.drain_s,
        reason=departure.reason,
    )


def progress(state: DetectorState, node: MonitoredNode, now: datetime) -> Event | None:
    """Return what is to be recorded of a node's drain now, if anything: its end, or that its time is over.

    Before the plan that answers it, a task may still be on its way to the node.
    """
    request = node.draining
    if request is None or node.drained or not node.planned or not node.present:
        return None
    if not tasks_on(state, node.name):
        event_id = derived_id(request.event_id, SERVICE, "drained")
        return NodeDrained(event_id=event_id, occurred_at=now, node=node.name)
    if request.save or (now - request.occurred_at).total_seconds() <= request.timeout_s:
        return None
    event_id = derived_id(request.event_id, SERVICE, "save")
    return request.model_copy(update={"event_id": event_id, "occurred_at": now, "save": True})
