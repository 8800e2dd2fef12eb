"""What monitors from outside have reported of nodes, and what followed: the fold of ``node.reported`` and its answers.

A source that errs, or whose credential was stolen, must not empty a cluster. So it may take a share of the nodes out of
use within an hour (``SHARE``), however many it reports. An operator may take any number: ``unicron drain`` counts as no
report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from shared.events.union import NodeReported, NodeReportHeld
from shared.service.state_codec import Unlogged

SHARE = 0.05
"""The part of the nodes that one source may take out of use within ``WINDOW_S``; one node in any case."""

WINDOW_S = 3600.0
"""The time in which the nodes of a source are counted, seconds."""


@dataclass(slots=True)
class Report:
    """A report that has not expired.

    Attributes:
        event: the newest event of it.
        settled: whether it has been answered, or an operator has returned the node since: nothing more follows.
        held: the reasons for which nothing followed from it and that the log has.
    """

    event: NodeReported
    settled: bool = False
    held: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Reports:
    """All reports.

    Attributes:
        known: node -> report (``NodeReported.report``) -> the report.
        taken: source -> the nodes that it has taken out of use, and when last.
        judged_at: when it was looked last at what follows; None: one is new since. Not in the log.
    """

    known: dict[str, dict[str, Report]] = field(default_factory=dict)
    taken: dict[str, dict[str, datetime]] = field(default_factory=dict)
    judged_at: Unlogged[datetime | None] = None

    def is_due(self, now: datetime, every_s: float) -> bool:
        """Return whether it is to be looked at what follows now; if so, note that it is."""
        if not self.known or (self.judged_at is not None and (now - self.judged_at).total_seconds() < every_s):
            return False
        self.judged_at = now
        return True

    def note(self, event: NodeReported) -> None:
        """Take a report. One that renews another is the same, unless what was a warning is an error now."""
        now, self.judged_at = event.occurred_at, None
        live = {name: one for name, one in self.known.get(event.node, {}).items() if one.event.expires_at > now}
        known = live.get(event.report)
        if known is None or (known.event.severity, event.severity) == ("warning", "error"):
            live[event.report] = Report(event)
        else:
            known.event = event
        self.known[event.node] = live

    def hold(self, event: NodeReportHeld) -> None:
        """Note that nothing follows from a report for now."""
        if (known := self.known.get(event.node, {}).get(event.report)) is not None:
            known.held.add(event.why)

    def answer(self, node: str, report: str, at: datetime) -> None:
        """Note that a report has taken its node out of use."""
        if (known := self.known.get(node, {}).get(report)) is not None:
            known.settled = True
        nodes = self.taken.setdefault(source_of(report), {})
        nodes[node] = at
        for name in [name for name, taken_at in nodes.items() if (at - taken_at).total_seconds() >= WINDOW_S]:
            del nodes[name]

    def overrule(self, node: str) -> None:
        """Note that an operator uses the node again: of what is reported of it by now, nothing more follows."""
        for known in self.known.get(node, {}).values():
            known.settled = True

    def may_take(self, source: str, node: str, nodes: int, now: datetime) -> bool:
        """Return whether a source may take a node out of use. ``nodes``: how many the cluster has."""
        recent = {
            name for name, at in self.taken.get(source, {}).items() if (now - at).total_seconds() < WINDOW_S
        }  # fmt: skip
        return node in recent or len(recent) < most(nodes)


def most(nodes: int) -> int:
    """Return how many of so many nodes one source may take out of use within ``WINDOW_S``."""
    return max(1, int(SHARE * nodes))


def source_of(report: str) -> str:
    """Return who has sent a report: the actor in its name (``NodeReported.report``)."""
    return report.rpartition("/")[0]
