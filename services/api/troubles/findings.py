"""What the projections and the heartbeats know of what is wrong now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from services.api import present
from services.api.cluster_metrics import failed_of_late
from services.api.live import LiveState
from services.api.postmortem.gather import lateness
from services.api.store.accounts import Accounts
from services.api.store.readers import ViewReader
from services.api.store.tables import INCIDENTS, NODES, SLOWDOWNS, SPANS, TASKS
from shared.costs.report import NO_COST
from shared.costs.settlement import failure_worker_s
from shared.interface.models import Incident, IncidentFacts
from shared.interface.readiness import Check
from shared.messages.reachability import Reachability
from shared.projections.nodes import AGENT_LIVES
from shared.tasks.specification import GOING_ON
from shared.views.documents import ClusterView, IncidentView, NodeReport, NodeState, NodeView, SpanView, TaskView
from shared.views.observed_views import SlowdownView

MOST_INCIDENTS = 100
"""Open ones that are looked at, the newest: where there are more, they have few causes."""

_OUT = (NodeState.ISOLATED.value, NodeState.LOST.value)
_IN_USE = (NodeState.READY, NodeState.CORDONED)


@dataclass(frozen=True)
class OngoingIncident:
    """An incident that is open, or from which something is still missing: a node, or workers of a task.

    ``short``: spans of tasks that have fewer workers because of it. ``lost_workers``: how many workers' time it loses
    now, as the cost report counts it.
    """

    incident: Incident
    short: Sequence[SpanView]
    lost_workers: float


@dataclass(frozen=True)
class FailedTask:
    """A task that has failed of late, and the incident because of which it has; None: there is none."""

    task: TaskView
    incident: IncidentFacts | None


@dataclass(frozen=True)
class Findings:
    """What is known of what is wrong. ``checks``: of the control plane. ``out``: nodes that are lost or isolated."""

    cluster: ClusterView
    checks: Sequence[Check] = ()
    incidents: Sequence[OngoingIncident] = ()
    tasks: Mapping[str, TaskView] = field(default_factory=dict)
    unwritten: Mapping[str, str] = field(default_factory=dict)
    """Task whose steps are all done -> why it cannot write what it has."""
    failed: Sequence[FailedTask] = ()
    out: Mapping[str, NodeView] = field(default_factory=dict)
    unreachable: Mapping[str, NodeView] = field(default_factory=dict)
    reachability: Reachability = field(default_factory=Reachability)
    slow: Sequence[SlowdownView] = ()
    held: Mapping[str, Sequence[NodeReport]] = field(default_factory=dict)
    """Node in use -> the reports of monitors on which nothing follows without an operator."""
    slow_nodes: Sequence[NodeView] = ()
    """Nodes in use that their preflight has found slow."""


def read_findings(
    views: ViewReader, cluster: ClusterView, live: LiveState, checks: Sequence[Check], now: datetime
) -> Findings:
    """Read what is wrong. The time it takes does not grow with the history."""
    tasks = {task.name: task for task in views.page(TASKS, states=GOING_ON)}
    out = {node.name: node for node in views.page(NODES, states=_OUT)}
    silent = views.several(NODES, live.reachability.unreachable)
    return Findings(
        cluster=cluster,
        checks=checks,
        incidents=_incidents(views, cluster, tasks.values(), out.values(), now),
        tasks=tasks,
        unwritten={name: why for name, task in tasks.items() if (why := present.waits_for_storage(task, live))},
        failed=_failed(views, now),
        out=out,
        unreachable={name: node for name, node in silent.items() if node.state in AGENT_LIVES},
        reachability=live.reachability,
        slow=views.page(SLOWDOWNS, states=["open"]),
        held={name: found for name, found in _held(views, now) if found},
        slow_nodes=[node for node in _noted(views) if node.preflight and node.state in _IN_USE],
    )


def _held(views: ViewReader, now: datetime) -> Iterator[tuple[str, list[NodeReport]]]:
    for node in _noted(views):
        if node.reports and node.state in _IN_USE:
            yield node.name, [one for one in present.live_reports(node, now) if one.held]


def _noted(views: ViewReader) -> list[NodeView]:
    """Return the nodes of which a monitor or a preflight says something."""
    return [node for node in views.all(NODES) if node.reports or node.preflight]


def _incidents(
    views: ViewReader, cluster: ClusterView, tasks: Iterable[TaskView], out: Iterable[NodeView], now: datetime
) -> list[OngoingIncident]:
    """Return the incidents that are open, those that took a node that is out, and those from which a task suffers."""
    newest = views.page(INCIDENTS, states=["open"], newest=True, limit=MOST_INCIDENTS)
    found = {view.id: view for view in newest}
    spans = views.several(SPANS, [*(node.span for node in out), *(key for task in tasks for key in task.shortfalls)])
    causes = {span.incident for span in spans.values() if span.incident and span.end is None}
    found |= views.several(INCIDENTS, sorted(causes - found.keys())[:MOST_INCIDENTS])
    growth = Accounts(views, now).growth(found)
    short: dict[str, list[SpanView]] = {}
    for span in spans.values():
        if span.task and span.end is None:
            short.setdefault(span.incident, []).append(span)
    return [
        OngoingIncident(
            incident=_shown(view, cluster, now),
            short=sorted(short.get(view.id, []), key=lambda span: span.task),
            lost_workers=failure_worker_s(growth[view.id]) if view.id in growth else 0.0,
        )
        for view in sorted(found.values(), key=lambda view: view.position)
    ]


def _shown(view: IncidentView, cluster: ClusterView, now: datetime) -> Incident:
    shown = present.incident_facts(view)
    usual_s, late_s = lateness(cluster, shown, now)
    return Incident(**shown.model_dump(), cost=NO_COST, counterfactuals=[], usual_s=usual_s, stuck_s=late_s)


def _failed(views: ViewReader, now: datetime) -> list[FailedTask]:
    """Return the tasks that have failed of late, the newest first."""
    return [FailedTask(task, _failure_of(views, task.name)) for task in failed_of_late(views, now)]


def _failure_of(views: ViewReader, task: str) -> IncidentFacts | None:
    """Return the newest incident of a failed task, if that has failed because of it."""
    newest = views.page(INCIDENTS, task=task, newest=True, limit=1)
    return present.incident_facts(newest[0]) if newest and task in newest[0].failed_tasks else None
