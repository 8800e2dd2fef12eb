"""The fold itself: it passes each event to the functions that change the documents concerned."""

from __future__ import annotations

from shared.events import union as events
from shared.events.union import Recorded
from shared.projections import incidents, milestones, nodes, observed, plans, requests, service_spans, spans, tasks
from shared.projections.documents import change_task
from shared.views.documents import ClusterView, Views
from shared.views.task_parts import CheckpointFailure, CopiesLack


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
        case events.ClusterConfigured():
            prices = {"price_per_worker_hour": event.price_per_worker_hour, "currency": event.currency}
            views.cluster["cluster"] = views.cluster.get("cluster", ClusterView()).model_copy(update=prices)
        case events.TaskSubmitted():
            tasks.submitted(views, recorded, event)
        case events.TaskStopRequested():
            tasks.stop_requested(views, recorded, event)
        case events.TaskResumeRequested():
            tasks.resume_requested(views, recorded, event)
        case events.TaskStopRefused():
            tasks.stop_refused(views, recorded, event)
        case events.TaskChanged():
            requests.changed(views, recorded, event)
        case events.TaskDeleted():
            requests.deleted(views, recorded, event)
        case events.TaskProgressed():
            tasks.progressed(views, event)
        case events.TaskIdentified():
            change_task(views, event.task, changed=event.changed)
        case events.TaskCheckpointed():
            change_task(views, event.task, checkpoint=event.path, checkpoint_step=event.step, checkpoint_failure=None)
        case events.TaskCheckpointFailed():
            failure = CheckpointFailure(step=event.step, worker=event.worker, reason=event.reason, at=event.occurred_at)
            change_task(views, event.task, checkpoint_failure=failure)
        case events.TaskCopiesLacking():
            lack = CopiesLack(step=event.step, worker=event.worker, reason=event.reason, at=event.occurred_at)
            change_task(views, event.task, copies_lacking=None if event.ended else lack)
        case events.TaskResultUnwritten():
            tasks.result_unwritten(views, event)
        case events.TaskStopped() | events.TaskFinished() | events.TaskFailed():
            tasks.ended(views, recorded, event)
        case events.NodeJoined():
            nodes.joined(views, recorded, event)
        case events.NodeAdopted():
            nodes.adopted(views, event)
        case events.NodeLeft():
            nodes.left(views, event)
        case events.NodeCordoned():
            nodes.cordoned(views, event)
        case events.NodeDraining():
            nodes.draining(views, event)
        case events.NodeDrained():
            nodes.drained(views, event)
        case events.NodeReturned():
            nodes.returned(views, event)
        case events.NodeMeasured():
            nodes.measured(views, recorded, event)
        case events.NodeReported():
            nodes.reported(views, event)
        case events.NodeReportHeld():
            nodes.report_held(views, event)
        case events.ErrorDetected():
            incidents.detected(views, recorded, event)
            nodes.failed(views, event)
            tasks.differs(views, event)
            tasks.given_up(views, event)
        case events.IncidentObserved():
            incidents.observed(views, event)
        case events.IncidentNoted():
            requests.noted(views, recorded, event)
        case events.IncidentAcknowledged():
            requests.acknowledged(views, recorded, event)
        case events.TroubleAcknowledged() | events.TroubleEnded():
            requests.taken(views, recorded, event)
        case events.PlanDecided():
            plans.decided(views, recorded, event)
        case events.StateMoved():
            milestones.moved(views, event)
        case events.WorkerSlowed():
            observed.slowed(views, recorded, event)
        case events.AnomalyObserved():
            observed.anomaly(views, event)
    kind, _, name = recorded.stream.partition("/")
    if kind == "task":
        change_task(views, name, version=recorded.stream_version)
    elif kind == "node" and (node := views.nodes.get(name)) is not None:
        views.nodes[name] = node.model_copy(update={"version": recorded.stream_version})
