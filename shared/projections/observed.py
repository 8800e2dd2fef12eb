"""The fold's part for what breaks nothing: slow workers of nodes, and anomalies of tasks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from shared.events.plans import Trigger
from shared.events.union import AnomalyObserved, PlanDecided, Recorded, WorkerSlowed
from shared.model import filled
from shared.projections.documents import change_task
from shared.views.documents import NodeView, Views
from shared.views.observed_views import OpenAnomaly, SlowdownView, SlowWorker

MOST_ANOMALIES = 16
"""Most open anomalies of a task that are kept, the newest ones: one of each kind, and slow links of several pairs of
nodes."""


def slowed(views: Views, recorded: Recorded, event: WorkerSlowed) -> None:
    """Note that a worker is slow, or no longer is, with its node and with the task in which it was measured."""
    node = views.nodes.get(event.node)
    if node is None:
        return
    known = {slow.worker: slow for slow in node.slow}
    before = known.pop(event.worker, None)
    if before is not None:
        _take_from_task(views, before)
    if event.slowdown > 1.0:
        slow = SlowWorker(
            id=before.id if before is not None else event.event_id,
            newest=event.event_id,
            worker=event.worker,
            slowdown=event.slowdown,
            task=event.task,
            step=event.step,
            since=before.since if before is not None else event.occurred_at,
        )
        known[event.worker] = slow
        if before is None:
            views.slowdowns[slow.id] = _found(recorded, event)
        else:
            worst = max(views.slowdowns[slow.id].worst, event.slowdown)
            _change_slowdown(views, slow.id, slowdown=event.slowdown, worst=worst)
        if (task := views.tasks.get(event.task)) is not None:
            change_task(views, event.task, slow={**task.slow, event.worker: event.slowdown})
    elif before is not None:
        _change_slowdown(views, before.id, ended_at=event.occurred_at, ended="it is as fast as its peers again")
    views.nodes[event.node] = node.model_copy(update={"slow": list(known.values())})


def _found(recorded: Recorded, event: WorkerSlowed) -> SlowdownView:
    return filled(
        SlowdownView,
        event,
        id=event.event_id,
        position=recorded.position,
        worst=event.slowdown,
        found_at=event.occurred_at,
    )


def answered(views: Views, event: PlanDecided) -> list[str]:
    """Note which slowdowns a plan answers: that of its cause, and those of unfinished plans that it takes over.

    Returns:
        Their ids.
    """
    found = []
    if event.trigger is Trigger.WORKER_SLOWED and event.slow is not None:
        nodes = {worker.rpartition("/")[0] for worker in event.slow.slowdowns}
        slow = [slow for name in sorted(nodes) if (node := views.nodes.get(name)) is not None for slow in node.slow]
        found += [one.id for one in slow if one.newest == event.cause]
    for superseded in event.supersedes:
        if (old := views.plans.get(superseded)) is not None:
            found += [slowdown for slowdown in old.slowdowns if slowdown not in found]
    for slowdown in found:
        _change_slowdown(views, slowdown, plans=[*views.slowdowns[slowdown].plans, event.plan])
    return found


def forget_slowness(views: Views, node: NodeView, at: datetime, why: str) -> NodeView:
    """Return a node that is lost, has left or joins anew, without its slow workers: what was measured is gone.

    ``at``, ``why``: when and why their slowdowns are over.
    """
    for slow in node.slow:
        _take_from_task(views, slow)
        _change_slowdown(views, slow.id, ended_at=at, ended=why)
    return node.model_copy(update={"slow": []}) if node.slow else node


def _change_slowdown(views: Views, key: str, **changes: Any) -> None:
    views.slowdowns[key] = views.slowdowns[key].model_copy(update=changes)


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
