"""The event of a node that is lost. ``silence.py`` and ``decide.py`` find such nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from services.detector.incidents.faults import SERVICE
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, derived_id

ONE_FAULT_S = 60.0
"""Time after the isolation of a node within which its loss belongs to the same incident: a machine that is about to
fail loses its links first, and one that an operator restarts is lost later."""


def node_lost(
    state: DetectorState, node: MonitoredNode, *, now: datetime, reason: str, limit_s: float, **details: Any
) -> ErrorDetected:
    """Return the error event of a lost node, with the tasks that have workers on the node. ``details``: evidence."""
    event_id = derived_id(node.joined, SERVICE, "lost")
    heard_at = node.heard_at or now
    left_out = state.isolated.get(node.name)
    same_fault = left_out is not None and (now - left_out.since).total_seconds() <= ONE_FAULT_S
    evidence = Evidence(incarnation=node.incarnation, tasks=state.lost_ranks(node))
    return ErrorDetected(
        event_id=event_id,
        occurred_at=min(heard_at, now),
        incident=left_out.error if left_out is not None and same_fault else event_id,
        kind=ErrorKind.NODE_LOST,
        severity=Severity.SEV1,
        method=Method.NODE_HEALTH,
        detected_at=now,
        node=node.name,
        evidence=evidence.mapping(
            reason=reason,
            last_heartbeat_at=heard_at.isoformat(),
            silence_s=(now - heard_at).total_seconds(),
            limit_s=limit_s,
            **details,
        ),
    )
