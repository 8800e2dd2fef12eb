"""What monitors from outside report of nodes: who may, what is new in a report, and how much is kept.

The detector decides what follows (``services.detector.nodes.reports``). Here a report becomes an event, unless the node
has it already: a monitor that looks every few seconds may tell the same as often.
"""

from __future__ import annotations

import time
import uuid
from datetime import datetime, timedelta

from services.api.access.access import Actor
from services.api.gateway import Gateway
from services.api.requests.node_requests import request
from shared.errors import InvalidInput, TooManyRequests
from shared.events.union import NodeReported
from shared.interface.models import ReportRequest
from shared.model import canonical_json, utc_now
from shared.projections.nodes import with_report
from shared.views.documents import NodeReport, NodeView

MOST_REPORTS = 8
"""Reports of one source that a node has at a time."""

EVIDENCE_CHARACTERS = 4096
"""Longest evidence of a report, as JSON: the lines of a log that show the trouble, or the answer of a service."""

SOONER = timedelta(seconds=30)
"""A deadline that is nearer by so much than the one that is known is news."""


async def report(api: Gateway, name: str, who: Actor, asked: ReportRequest) -> NodeReport:
    """Take a report of a node.

    Returns:
        It, as the node has it now.

    Raises:
        Forbidden: the actor may not report of this node.
        InvalidInput: the evidence is too long, or no JSON.
        NotFound: there is no such node.
        TooManyRequests: the source reports too much that is new, or has too many reports of this node.
    """
    who.require_to_report(name)
    _check_evidence(asked)
    event = _event(name, who, asked, utc_now())

    async def judge(node: NodeView) -> NodeReported | None:
        if not is_news(node, event):
            return None
        others = [one for one in node.reports if one.actor == who.name and one.key != asked.key]
        if sum(one.expires_at > event.occurred_at for one in others) >= MOST_REPORTS:
            raise TooManyRequests(f"{who.name} has {MOST_REPORTS} reports of node {name!r}, the most that are kept")
        api.reports.admit(who.name, time.monotonic())
        return event

    node = await request(api, name, judge)
    return next((one for one in node.reports if one.report == event.report), with_report([], event)[-1])


def is_news(node: NodeView, event: NodeReported) -> bool:
    """Return whether a report says what the node's reports do not. Pure.

    It does if it is new, graver than before, has a nearer deadline, or if the known one has lived for half of its time.
    """
    known = next((one for one in node.reports if one.report == event.report), None)
    if known is None or known.expires_at - event.occurred_at < (event.expires_at - event.occurred_at) / 2:
        return True
    if (known.severity, event.severity) == ("warning", "error"):
        return True
    return event.deadline_at is not None and (
        known.deadline_at is None or event.deadline_at < known.deadline_at - SOONER
    )  # fmt: skip


def _event(name: str, who: Actor, asked: ReportRequest, now: datetime) -> NodeReported:
    deadline_at = None if asked.deadline_s is None else now + timedelta(seconds=asked.deadline_s)
    return NodeReported(
        event_id=str(uuid.uuid4()),
        occurred_at=now,
        node=name,
        actor=who.name,
        key=asked.key,
        severity=asked.severity,
        reason=asked.reason,
        evidence=asked.evidence,
        expires_at=now + timedelta(seconds=asked.expires_s),
        deadline_at=deadline_at,
    )


def _check_evidence(asked: ReportRequest) -> None:
    try:
        length = len(canonical_json(asked.evidence))
    except ValueError:
        length, problem = 0, "must be JSON, which has neither NaN nor infinities"
    else:
        problem = f"has {length} characters as JSON; at most {EVIDENCE_CHARACTERS} are allowed"
    if not 0 < length <= EVIDENCE_CHARACTERS:
        raise InvalidInput.of("evidence", "", problem, f"evidence: {problem}")
