"""The fold's part for spans: times in which nodes are allocated, open, closed or away, or tasks lack workers.

A span of a node follows from its state. A task has a demand while it could use more workers than it is to have, and a
shortfall while an incident's plan has left it fewer than before: until it has as many again, no longer wants them, or
the node that the incident took is back (or gone for good).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from shared.events.base import EventBase, NodeEvent, TaskEvent
from shared.events.union import (
    ErrorDetected,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskCheckpointed,
    TaskCheckpointFailed,
    TaskCopiesLacking,
    TaskIdentified,
    TaskProgressed,
    TaskSubmitted,
)
from shared.projections.documents import change_task
from shared.tasks.specification import ENDED, TaskState
from shared.views.documents import Impact, NodeState, NodeView, SpanKind, SpanView, TaskView, Views

_KINDS = {
    NodeState.READY: SpanKind.OPEN,
    NodeState.CORDONED: SpanKind.CLOSED,
    NodeState.DRAINING: SpanKind.CLOSED,
    NodeState.LOST: SpanKind.AWAY,
    NodeState.ISOLATED: SpanKind.AWAY,
}
"""The kinds of span that last while a node is in each state; in other states (drained, left) it is not allocated."""


def nodes_of(event: EventBase) -> list[str]:
    """Return the node whose state an event may change."""
    if isinstance(event, ErrorDetected):
        return [event.node] if event.node is not None else []
    return [event.node] if isinstance(event, NodeEvent) else []


def tasks_of(event: EventBase) -> list[str]:
    """Return the tasks whose workers or wishes an event may change."""
    if isinstance(event, TaskIdentified | TaskProgressed | TaskCheckpointed | TaskCheckpointFailed | TaskCopiesLacking):
        return []
    if isinstance(event, PlanDecided):
        return [change.task for change in event.changes]
    return [event.task] if isinstance(event, TaskEvent | StateMoved) else []


def follow_node(views: Views, name: str, before: NodeView | None, recorded: Recorded) -> None:
    """Begin and end spans as the node's state has changed. ``before``: the node before the event; None: unknown."""
    node = views.nodes.get(name)
    if node is None:
        return
    kind = _KINDS.get(node.state)
    if not node.span and kind is SpanKind.AWAY:
        return  # a node that is not allocated cannot be lost
    known = views.spans[node.span] if node.span else None
    if known is not None and known.kind is kind and (known.workers, known.hardware) == (node.workers, node.hardware):
        return
    if known is None and kind is None:
        return
    at = recorded.recorded_at
    views.nodes[name] = node = _with_allocation(node, before, kind is not None, at)
    event = recorded.event
    incident = ""
    if kind is SpanKind.AWAY and isinstance(event, ErrorDetected):
        incident = event.incident
        if known is not None:  # the node has been away since the fault occurred; a span that began later stays
            at = min(max(event.occurred_at, known.start), at)
    if known is not None:
        end(views, known, at)
        if known.kind is SpanKind.AWAY:
            _end_shortfalls_of(views, known.incident, at)
            _note_return(views, known.incident, at)
    _follow_away(views, name, kind is SpanKind.AWAY)
    if kind is None:
        views.nodes[name] = node.model_copy(update={"span": ""})
        return
    fields: dict[str, Any] = {"node": name, "workers": node.workers, "hardware": node.hardware, "incident": incident}
    if (view := views.incidents.get(incident)) is not None:
        fields["detected_at"] = view.detected_at
    key = begin(views, kind, name, recorded.position, at, **fields)
    views.nodes[name] = node.model_copy(update={"span": key})


def _follow_away(views: Views, name: str, away: bool) -> None:
    cluster = views.cluster.get("cluster")
    if cluster is not None and away is not (name in cluster.away):
        others = [node for node in cluster.away if node != name]
        views.cluster["cluster"] = cluster.model_copy(update={"away": [*others, name] if away else others})


def _with_allocation(node: NodeView, before: NodeView | None, allocated: bool, at: datetime) -> NodeView:
    """Return the node with its allocated time brought up to ``at``."""
    worker_s = node.allocated_worker_s
    if before is not None and before.allocated_since is not None:
        worker_s += len(before.workers) * max((at - before.allocated_since).total_seconds(), 0.0)
    return node.model_copy(
        update={"allocated_worker_s": worker_s, "allocated_since": at if allocated else None},
    )


def follow_task(views: Views, name: str, recorded: Recorded) -> None:
    """Begin and end the task's demand, and end its shortfalls, as its wishes and its workers have changed."""
    task = views.tasks.get(name)
    if task is None:
        return
    at = recorded.recorded_at
    wants = task.state not in ENDED and task.state is not TaskState.STOPPING
    if task.shortfalls:
        known = [views.spans[key] for key in task.shortfalls]
        gone = isinstance(recorded.event, TaskSubmitted) or not wants
        most = task.spec.most_workers  # a user may have lowered it since the fault
        over = [span for span in known if gone or len(task.planned) >= min(span.before, most)]
        for span in known:
            if span in over:
                _end_shortfall(views, span, at)
            elif span.after != len(task.planned):
                views.spans[span.id] = span.model_copy(update={"after": len(task.planned)})
    _follow_demand(views, views.tasks[name], wants and len(task.planned) < task.spec.most_workers, recorded)


def _follow_demand(views: Views, task: TaskView, wants: bool, recorded: Recorded) -> None:
    hardware = _hardware(views, task)
    known = views.spans[task.demand] if task.demand else None
    if known is not None and wants and known.hardware == hardware:
        return
    if known is not None:
        end(views, known, recorded.recorded_at)
    key = ""
    if wants:
        fields = {"task": task.name, "hardware": hardware}
        key = begin(views, SpanKind.DEMAND, task.name, recorded.position, recorded.recorded_at, **fields)
    if key != task.demand:
        change_task(views, task.name, demand=key)


def _hardware(views: Views, task: TaskView) -> str:
    """Return the kind of the task's workers, which it keeps; empty while it has none: it would take any."""
    node = views.nodes.get(task.planned[0].rpartition("/")[0]) if task.planned else None
    return node.hardware if node is not None else ""


def begin_shortfalls(views: Views, impact: Impact, incidents: Sequence[str], position: int, at: datetime) -> None:
    """Note the workers that a plan takes from a task because of incidents.

    Each has those of the node that it took, and lacks them until that node is back. The last one has the others, too,
    which the task gives up with them.
    """
    known = [view for name in incidents if (view := views.incidents.get(name)) is not None]
    task, after = views.tasks.get(impact.task), set(impact.after)
    gone = [worker for worker in impact.before if worker not in after]
    if task is None or not gone or len(impact.after) >= len(impact.before):
        return
    if task.state in ENDED or task.state is TaskState.STOPPING:
        return
    before, keys = len(impact.before), list(task.shortfalls)
    for view in known:
        is_last = view is known[-1]
        taken = [worker for worker in gone if is_last or worker.rpartition("/")[0] == view.node]
        if not taken:
            continue
        fields: dict[str, Any] = {
            "task": impact.task,
            "incident": view.id,
            "workers": taken,
            "before": before,
            "after": len(impact.after) if is_last else max(len(impact.after), before - len(taken)),
            "weight": impact.weight,
            "flop_per_worker_s": impact.waf_flop_per_s / len(impact.before),
        }
        subject = impact.task if is_last else f"{impact.task}/{view.id}"
        keys.append(key := begin(views, SpanKind.SHORTFALL, subject, position, at, **fields))
        views.incidents[view.id] = view.model_copy(update={"shortfalls": [*view.shortfalls, key]})
        gone, before = [worker for worker in gone if worker not in taken], before - len(taken)
    change_task(views, impact.task, shortfalls=keys)


def reweigh_shortfalls(views: Views, name: str, weight: float, recorded: Recorded) -> None:
    """Have what a task lacks because of incidents count by another weight from now on."""
    task = views.tasks[name]
    for index, known in enumerate(views.spans[key] for key in task.shortfalls):
        _end_shortfall(views, known, recorded.recorded_at)
        key = f"{recorded.position}/{known.kind.value}/{name}/{index}"
        rate = known.flop_per_worker_s * weight / known.weight
        changes = {"id": key, "position": recorded.position, "start": recorded.recorded_at}
        views.spans[key] = known.model_copy(update={**changes, "weight": weight, "flop_per_worker_s": rate})
        if (incident := views.incidents.get(known.incident)) is not None:
            shortfalls = [*incident.shortfalls, key]
            views.incidents[incident.id] = incident.model_copy(update={"shortfalls": shortfalls})
        change_task(views, name, shortfalls=[*views.tasks[name].shortfalls, key])


def _end_shortfalls_of(views: Views, incident: str, at: datetime) -> None:
    view = views.incidents.get(incident)
    for key in list(view.shortfalls) if view is not None else []:
        _end_shortfall(views, views.spans[key], at)


def _note_return(views: Views, incident: str, at: datetime) -> None:
    """Note when the node that an incident took was back, or left for good; the model of another answer needs this."""
    if (view := views.incidents.get(incident)) is not None and view.other_answers.back_at is None:
        answers = view.other_answers.model_copy(update={"back_at": at})
        views.incidents[incident] = view.model_copy(update={"other_answers": answers})


def _end_shortfall(views: Views, span: SpanView, at: datetime) -> None:
    end(views, span, at)
    if (view := views.incidents.get(span.incident)) is not None:
        past = [*view.past_shortfalls, span.id]
        changes = {"shortfalls": _without(view.shortfalls, span.id), "past_shortfalls": past}
        views.incidents[view.id] = view.model_copy(update=changes)
    if (task := views.tasks.get(span.task)) is not None:
        change_task(views, task.name, shortfalls=_without(task.shortfalls, span.id))


def _without(keys: Iterable[str], key: str) -> list[str]:
    return [one for one in keys if one != key]


def begin(views: Views, kind: SpanKind, subject: str, position: int, at: datetime, **fields: Any) -> str:
    """Add a span that lasts; return its key."""
    key = f"{position}/{kind.value}/{subject}"
    views.spans[key] = SpanView(id=key, position=position, kind=kind, start=at, **fields)
    return key


def end(views: Views, span: SpanView, at: datetime, **changes: Any) -> None:
    """End a span; ``changes``: further attributes that are known by then."""
    views.spans[span.id] = span.model_copy(update={"end": max(at, span.start), **changes})
