"""The fold itself: each event goes to the functions of the documents that it changes."""

from __future__ import annotations

from shared.events.union import (
    AnomalyObserved,
    ClusterConfigured,
    ErrorDetected,
    IncidentAcknowledged,
    IncidentNoted,
    IncidentObserved,
    NodeAdopted,
    NodeCordoned,
    NodeDrained,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeReturned,
    PlanDecided,
    Recorded,
    StateMoved,
    TaskChanged,
    TaskCheckpointed,
    TaskCheckpointFailed,
    TaskCopiesLacking,
    TaskDeleted,
    TaskFailed,
    TaskFinished,
    TaskIdentified,
    TaskProgressed,
    TaskResultUnwritten,
    TaskResumeRequested,
    TaskStopped,
    TaskStopRefused,
    TaskStopRequested,
    TaskSubmitted,
    WorkerSlowed,
)
from shared.projections import incidents, milestones, nodes, observed, plans, requests, service_spans, spans, tasks
from shared.projections.documents import change_task
from shared.views.documents import CheckpointFailure, ClusterView, CopiesLack, Views


def evolve(views: Views, recorded: Recorded) -> None:
    """Fold one event into the views."""
    nodes_before = {name: views.nodes.get(name) for name in spans.nodes_of(recorded.event)}
    _evolve(views, recorded)
    for name, before in nodes_before.items():
        spans.follow_node(views, name, before, recorded)
    for name in spans.tasks_of(recorded.event):
        spans.follow_task(views, name, recorded)
        service_spans.follow_progress(views, name, recorded)
    service_spans.follow_healthy_line(views, recorded)


def _evolve(views: Views, recorded: Recorded) -> None:
    event = recorded.event
    match event:
        case ClusterConfigured():
            prices = {"price_per_worker_hour": event.price_per_worker_hour, "currency": event.currency}
            views.cluster["cluster"] = views.cluster.get("cluster", ClusterView()).model_copy(update=prices)
        case TaskSubmitted():
            tasks.submitted(views, recorded, event)
        case TaskStopRequested():
            tasks.stop_requested(views, recorded, event)
        case TaskResumeRequested():
            tasks.resume_requested(views, recorded, event)
        case TaskStopRefused():
            tasks.stop_refused(views, recorded, event)
        case TaskChanged():
            requests.changed(views, recorded, event)
        case TaskDeleted():
            requests.deleted(views, recorded, event)
        case TaskProgressed():
            tasks.progressed(views, event)
        case TaskIdentified():
            change_task(views, event.task, changed=event.changed)
        case TaskCheckpointed():
            change_task(views, event.task, checkpoint=event.path, checkpoint_step=event.step, checkpoint_failure=None)
        case TaskCheckpointFailed():
            failure = CheckpointFailure(step=event.step, worker=event.worker, reason=event.reason, at=event.occurred_at)
            change_task(views, event.task, checkpoint_failure=failure)
        case TaskCopiesLacking():
            lack = CopiesLack(step=event.step, worker=event.worker, reason=event.reason, at=event.occurred_at)
            change_task(views, event.task, copies_lacking=None if event.ended else lack)
        case TaskResultUnwritten():
            tasks.result_unwritten(views, event)
        case TaskStopped() | TaskFinished() | TaskFailed():
            tasks.ended(views, recorded, event)
        case NodeJoined():
            nodes.joined(views, recorded, event)
        case NodeAdopted():
            nodes.adopted(views, event)
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
            tasks.differs(views, event)
            tasks.given_up(views, event)
        case IncidentObserved():
            incidents.observed(views, event)
        case IncidentNoted():
            requests.noted(views, recorded, event)
        case IncidentAcknowledged():
            requests.acknowledged(views, recorded, event)
        case PlanDecided():
            plans.decided(views, recorded, event)
        case StateMoved():
            milestones.moved(views, event)
        case WorkerSlowed():
            observed.slowed(views, recorded, event)
        case AnomalyObserved():
            observed.anomaly(views, event)
    kind, _, name = recorded.stream.partition("/")
    if kind == "task":
        change_task(views, name, version=recorded.stream_version)
    elif kind == "node" and (node := views.nodes.get(name)) is not None:
        views.nodes[name] = node.model_copy(update={"version": recorded.stream_version})
