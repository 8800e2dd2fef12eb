"""The fold itself: each event goes to the functions of the documents that it changes."""

from __future__ import annotations

from services.api.projections import incidents, milestones, nodes, plans, tasks
from services.api.projections.documents import change_task
from services.api.views import ClusterView, Views
from shared.events import (
    ClusterConfigured,
    ErrorDetected,
    NodeCordoned,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeReturned,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskCheckpointed,
    TaskFailed,
    TaskFinished,
    TaskProgressed,
    TaskStopped,
    TaskStopRequested,
    TaskSubmitted,
)
from shared.tasks import TaskState


def evolve(views: Views, recorded: Recorded) -> None:
    """Fold one event into the views."""
    event = recorded.event
    match event:
        case ClusterConfigured():
            views.cluster["cluster"] = ClusterView(
                price_per_worker_hour=event.price_per_worker_hour, currency=event.currency
            )
        case TaskSubmitted():
            tasks.submitted(views, recorded, event)
        case TaskStopRequested():
            change_task(views, event.task, state=TaskState.STOPPING, reason="asked to stop")
        case TaskProgressed():
            tasks.progressed(views, event)
        case TaskCheckpointed():
            change_task(views, event.task, checkpoint=event.path, checkpoint_step=event.step)
        case TaskStopped() | TaskFinished() | TaskFailed():
            tasks.ended(views, event)
        case NodeJoined():
            nodes.joined(views, recorded, event)
        case NodeLeft():
            nodes.left(views, event)
        case NodeCordoned():
            nodes.cordoned(views, event)
        case NodeDraining():
            nodes.draining(views, event)
        case NodeDrained():
            nodes.drained(views, event)
        case NodeReturned():
            nodes.returned(views, event)
        case ErrorDetected():
            incidents.detected(views, recorded, event)
            nodes.failed(views, event)
        case PlanDecided():
            plans.decided(views, recorded, event)
        case StateMoved():
            milestones.moved(views, event)
    kind, _, name = recorded.stream.partition("/")
    if kind == "task":
        change_task(views, name, version=recorded.stream_version)
    elif kind == "node" and (node := views.nodes.get(name)) is not None:
        views.nodes[name] = node.model_copy(update={"version": recorded.stream_version})
