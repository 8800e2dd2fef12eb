"""The fold's part for what breaks nothing: slow workers of nodes, and anomalies of tasks."""

from __future__ import annotations

from services.api.observed_views import OpenAnomaly, SlowWorker
from services.api.projections.documents import change_task
from services.api.views import NodeView, Views
from shared.events import AnomalyObserved, WorkerSlowed

MOST_ANOMALIES = 16
"""Open anomalies of a task that are kept, the newest: one of each kind, and slow links of several pairs of nodes."""


def slowed(views: Views, event: WorkerSlowed) -> None:
    """Note that a worker is slow, or no longer is, with its node and with the task in which it was measured."""
    node = views.nodes.get(event.node)
    if node is None:
        return
    known = {slow.worker: slow for slow in node.slow}
    before = known.pop(event.worker, None)
    if before is not None:
        _take_from_task(views, before)
    if event.slowdown > 1.0:
        since = before.since if before is not None else event.occurred_at
        known[event.worker] = SlowWorker(
            worker=event.worker, slowdown=event.slowdown, task=event.task, step=event.step, since=since
        )
        if (task := views.tasks.get(event.task)) is not None:
            change_task(views, event.task, slow={**task.slow, event.worker: event.slowdown})
    views.nodes[event.node] = node.model_copy(update={"slow": list(known.values())})


def forget_slowness(views: Views, node: NodeView) -> NodeView:
    """Return a node that is lost, has left or joins anew, without its slow workers: what was measured is gone."""
    for slow in node.slow:
        _take_from_task(views, slow)
    return node.model_copy(update={"slow": []}) if node.slow else node


def _take_from_task(views: Views, slow: SlowWorker) -> None:
    task = views.tasks.get(slow.task)
    if task is not None and slow.worker in task.slow:
        change_task(views, slow.task, slow={worker: by for worker, by in task.slow.items() if worker != slow.worker})


def anomaly(views: Views, event: AnomalyObserved) -> None:
    """Add an anomaly to its task, or take one away that is over."""
    task = views.tasks.get(event.task)
    if task is None:
        return
    place = (event.kind, event.peer and event.node, event.peer)
    others = [one for one in task.anomalies if (one.kind, one.node, one.peer) != place]
    if not event.ended:
        others.append(
            OpenAnomaly(
                kind=event.kind,
                generation=event.generation,
                step=event.step,
                value=event.value,
                expected=event.expected,
                unit=str(event.evidence.get("unit", "")),
                at=event.occurred_at,
                node=event.peer and event.node,
                peer=event.peer,
            )
        )
    change_task(views, event.task, anomalies=others[-MOST_ANOMALIES:])
