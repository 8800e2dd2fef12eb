"""What a notice says: one of something that somebody has to know, and one when that is over. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from shared.events.base import derived_id
from shared.model import Model

Topic = Literal["incident", "incident-stuck", "task-failed", "task-waiting", "node-isolated", "control-plane"]

URGENT: tuple[Topic, ...] = ("incident-stuck", "task-failed", "task-waiting", "node-isolated", "control-plane")
"""What people are called for: an incident that is healed as usual is none of it."""

TOPICS: tuple[Topic, ...] = ("incident", *URGENT)

Severity = Literal["critical", "error", "warning"]

SEVERITIES: Mapping[Topic, Severity] = {
    "incident": "warning",
    "incident-stuck": "critical",
    "task-failed": "critical",
    "task-waiting": "error",
    "node-isolated": "warning",
    "control-plane": "critical",
}
"""How grave each is, in PagerDuty's words: critical where training stands or the next fault would not be healed."""

TYPES: Mapping[Topic, tuple[str, str]] = {
    "incident": ("incident.opened", "incident.closed"),
    "incident-stuck": ("incident.stuck", "incident.stuck.resolved"),
    "task-failed": ("task.failed", "task.failed.resolved"),
    "task-waiting": ("task.waiting", "task.waiting.resolved"),
    "node-isolated": ("node.isolated", "node.isolated.resolved"),
    "control-plane": ("control-plane.degraded", "control-plane.degraded.resolved"),
}
"""Names of the first notice and of the one that resolves it."""


class Subject(Model):
    """What notices are about. Two with equal keys are the same trouble.

    Attributes:
        topic: kind of the trouble.
        name: of the incident, the task or the node; empty: the control plane.
        occurrence: tells it from another trouble of the same thing that may be open beside it, such as the id of its
            event; empty: there is one at a time.
    """

    topic: Topic
    name: str = ""
    occurrence: str = ""

    @property
    def key(self) -> str:
        """What tells this trouble from all others; at most the 255 characters of PagerDuty's ``dedup_key``."""
        return derived_id(self.name, "notice", f"{self.topic} {self.occurrence}")


@dataclass(frozen=True)
class Notice:
    """What is sent.

    Attributes:
        subject: what it is about.
        type: what has happened to it, of ``TYPES`` or ``incident.reopened``.
        resolved: whether this is over.
        summary: one line for people.
        link: to what people read of it.
        data: the facts, as JSON has them.
        at: when it was written.
        earlier: troubles of which the receiver was told before, and which are over (``Sent.ended``).
    """

    subject: Subject
    type: str
    resolved: bool
    summary: str
    link: str
    at: datetime
    data: Mapping[str, Any] = field(default_factory=dict)
    earlier: int = 0

    @property
    def id(self) -> str:
        """Of this notice, however often it is sent."""
        return derived_id(self.subject.key, "notice", f"{self.type} {self.earlier}")


def notice(
    subject: Subject, *, summary: str, link: str, data: Mapping[str, Any], at: datetime, resolved: bool, type: str = ""
) -> Notice:
    """Return a notice about a subject. ``type``: of one that is neither its first nor its last; empty: it follows."""
    return Notice(subject, type or TYPES[subject.topic][resolved], resolved, summary, link, at, data)
