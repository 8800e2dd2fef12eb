"""The fold from the log to the views: pure, one function for each type of event.

``evolve(views, recorded)`` changes the documents of ``views``; it knows no clock and no table. Times come from the
events: ``occurred_at`` of the fault and of each milestone, ``recorded_at`` of plans.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from services.api.incidents import detected, planned, refresh
from services.api.views import (
    SHORTEST_STEP_S,
    ClusterView,
    Milestone,
    NodeView,
    PlanState,
    PlanView,
    Result,
    TaskView,
    Views,
)
from shared.cost import Impact
from shared.events import (
    ClusterConfigured,
    ErrorDetected,
    NodeJoined,
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
from shared.plans import TaskChange, Trigger
from shared.severities import ErrorKind, Severity
from shared.tasks import ENDED, TaskState


def evolve(views: Views, recorded: Recorded) -> None:
    """Fold one event into the views."""
    event = recorded.event
    match event:
        case ClusterConfigured():
            views.cluster["cluster"] = ClusterView(
                price_per_worker_hour=event.price_per_worker_hour, currency=event.currency
            )
        case TaskSubmitted():
            _submitted(views, recorded, event)
        case TaskStopRequested():
            _task(views, event.task, state=TaskState.STOPPING, reason="asked to stop")
        case TaskProgressed():
            _progressed(views, event)
        case TaskCheckpointed():
            _task(views, event.task, checkpoint=event.path, checkpoint_step=event.step)
        case TaskStopped() | TaskFinished() | TaskFailed():
            _ended(views, event)
        case NodeJoined():
            _joined(views, recorded, event)
        case ErrorDetected():
            _error(views, recorded, event)
        case PlanDecided():
            _plan(views, recorded, event)
        case StateMoved():
            _moved(views, event)
    if recorded.stream.startswith("task/"):
        _task(views, recorded.stream.removeprefix("task/"), version=recorded.stream_version)


def _task(views: Views, name: str, **changes: Any) -> None:
    """Change fields of a task, if it is known."""
    task = views.tasks.get(name)
    if task is not None:
        views.tasks[name] = task.model_copy(update=changes)


def _impact(views: Views, plan: str, task: str, **changes: Any) -> None:
    """Change fields of what a plan does to a task, if both are known."""
    view = views.plans.get(plan)
    if view is not None and task in view.impacts:
        impact = view.impacts[task].model_copy(update=changes)
        views.plans[plan] = view.model_copy(update={"impacts": {**view.impacts, task: impact}})


def _submitted(views: Views, recorded: Recorded, event: TaskSubmitted) -> None:
    known = views.tasks.get(event.task)
    views.tasks[event.task] = TaskView(
        name=event.task,
        position=recorded.position,
        version=recorded.stream_version,
        submission_id=event.event_id,
        submitted_at=recorded.recorded_at,
        spec=event.spec,
        reason="waiting for the planner",
        step=event.step,
        first_step=event.step,
        earlier_flop=known.flop(event.step) if known and event.checkpoint else 0.0,
        checkpoint=event.checkpoint,
        checkpoint_step=event.step if event.checkpoint else 0,
    )


def _progressed(views: Views, event: TaskProgressed) -> None:
    task = views.tasks.get(event.task)
    if task is None or event.generation < task.generation:
        return
    _task(
        views,
        event.task,
        step=max(task.step, event.step),
        step_s=event.step_s if event.step_s >= SHORTEST_STEP_S else task.step_s,
        loss=task.loss if event.loss is None else event.loss,
    )


def _ended(views: Views, event: TaskStopped | TaskFinished | TaskFailed) -> None:
    """End a task; the time it trained ends with it, and a plan that was not done with it never will be.

    One that is paused has only saved its state.
    """
    task = views.tasks.get(event.task)
    if task is None:
        return
    if isinstance(event, TaskStopped) and event.path:
        _task(views, event.task, checkpoint=event.path, checkpoint_step=event.step)
    if isinstance(event, TaskStopped) and task.pausing and task.state is not TaskState.STOPPING:
        _impact(views, task.training_plan, event.task, until=event.occurred_at)
        _task(views, event.task, step=event.step, training_plan="")
        return
    changes: dict[str, Any] = {"ended_at": event.occurred_at, "step": event.step, "training_plan": ""}
    match event:
        case TaskStopped():
            changes |= {"state": TaskState.STOPPED, "reason": "stopped as asked"}
        case TaskFinished():
            result = Result(
                steps=event.step, samples_sha256=event.samples_sha256, parameters_path=event.parameters_path
            )
            loss = task.loss if event.loss is None else event.loss
            changes |= {"state": TaskState.SUCCEEDED, "reason": "all steps done", "result": result, "loss": loss}
        case TaskFailed():
            changes |= {"state": TaskState.FAILED, "reason": event.reason, "traceback": event.traceback}
    _impact(views, task.training_plan, event.task, until=event.occurred_at)
    if task.plan and task.state is not TaskState.STOPPING:
        _close(views, task.plan, event.task, event.occurred_at)
        changes["plan"] = ""
    _task(views, event.task, **changes)
    if isinstance(event, TaskFailed) and (incident := views.incidents.get(event.incident)) is not None:
        views.incidents[incident.id] = incident.model_copy(update={"response": incident.response or "fail-task"})


def _joined(views: Views, recorded: Recorded, event: NodeJoined) -> None:
    known = views.nodes.get(event.node)
    views.nodes[event.node] = NodeView(
        name=event.node,
        position=known.position if known else recorded.position,
        incarnation=event.incarnation,
        agent_pid=event.agent_pid,
        domain=event.domain,
        workers=event.workers,
        joined_at=recorded.recorded_at,
    )


def _error(views: Views, recorded: Recorded, event: ErrorDetected) -> None:
    detected(views, recorded, event)
    node = views.nodes.get(event.node or "")
    if node is not None and event.severity is Severity.SEV1:
        lost = event.kind is ErrorKind.NODE_LOST
        reason = f"{event.kind.value} ({event.method.value}), incident {event.incident}"
        state = "lost" if lost else "isolated"
        views.nodes[node.name] = node.model_copy(update={"state": state, "reason": reason})


def _acts(change: TaskChange) -> bool:
    """Tell whether the transition has anything to do for this task."""
    return bool(
        change.interrupted or change.target or change.hold or change.failed or change.release or change.prepare
    ) or change.action in {"stop", "pause", "end"}


def _after(change: TaskChange, before: list[str]) -> list[str]:
    """Return the workers the task is to have when the plan is done."""
    stage = change.target or change.interrupted
    if stage is not None:
        return [member.worker for member in stage.members]
    return [] if change.action in {"stop", "pause", "end"} or change.failed or change.hold else before


def _plan(views: Views, recorded: Recorded, event: PlanDecided) -> None:
    """Add a plan: its tasks move from the plans that had them to this one."""
    at = recorded.recorded_at
    incidents = [event.incident] if event.incident else []
    impacts: dict[str, Impact] = {}
    acting = [change for change in event.changes if _acts(change)]
    for superseded in event.supersedes:
        if (old := views.plans.get(superseded)) is not None:
            incidents += [i for i in old.incidents if i not in incidents and _is_open(views, i)]
    for change in acting:
        task = views.tasks.get(change.task)
        if task is None:
            continue
        impact = _planned_impact(change, task, at)
        impacts[change.task] = impact
        if task.plan:
            _close(views, task.plan, change.task, at, superseded_by=event.plan)
        if impact.faulted:
            _impact(views, task.training_plan, change.task, until=at)
        views.tasks[change.task] = _planned_task(task, change, event)
    if event.trigger is not Trigger.ERROR and event.solution is not None:
        for name, count in event.solution.assignment.items():
            _replanned(views, name, count)
    for name, reason in event.queued.items():
        task = views.tasks.get(name)
        if task is None or task.state in ENDED:
            continue
        _task(views, name, queued_reason=reason)
        if name not in impacts and task.state in {TaskState.PENDING, TaskState.QUEUED}:
            _task(views, name, state=TaskState.QUEUED, reason=reason)
    views.plans[event.plan] = PlanView(
        id=event.plan,
        position=recorded.position,
        decided_at=at,
        trigger=event.trigger,
        cause=event.cause,
        incident=event.incident,
        incidents=incidents,
        response=event.response,
        supersedes=event.supersedes,
        state=PlanState.OUTSTANDING if impacts else PlanState.DONE,
        outstanding=sorted(impacts),
        impacts=impacts,
        queued=event.queued,
    )
    for incident in incidents:
        planned(views, incident, event, at)


def _replanned(views: Views, name: str, count: int) -> None:
    """Take what the solver gives a task, asked anew by something other than a fault, as its full strength."""
    task = views.tasks.get(name)
    if task is None or task.state in ENDED:
        return
    _task(views, name, strength=count)
    if task.state is TaskState.DEGRADED and not task.plan:
        _task(views, name, state=TaskState.RUNNING, reason="")


def _is_open(views: Views, incident: str) -> bool:
    view = views.incidents.get(incident)
    return view is not None and view.restored_at is None


def _planned_impact(change: TaskChange, task: TaskView, at: datetime) -> Impact:
    return Impact(
        task=change.task,
        before=task.planned,
        after=_after(change, task.planned),
        survivors=change.survivors,
        faulted=bool(change.failed or change.hold or change.interrupted),
        planned_at=at,
        step_s=task.step_s,
        waf_flop_per_s=task.spec.weight * task.update_flop / task.step_s if task.step_s else 0.0,
    )


def _planned_task(task: TaskView, change: TaskChange, event: PlanDecided) -> TaskView:
    """Return the task as it is from the plan on, until the first milestone."""
    after = _after(change, task.planned)
    strength = max(task.strength, len(task.planned)) if event.trigger is Trigger.ERROR else len(after)
    changes: dict[str, Any] = {
        "plan": event.plan,
        "planned": after,
        "pausing": change.action == "pause",
        "stages": change.stages,
        "strength": strength,
        "failed_workers": change.failed,
        "queued_reason": event.queued.get(task.name, ""),
    }
    if task.state in ENDED:
        return task.model_copy(update={"plan": event.plan, "planned": []})
    if task.state is TaskState.STOPPING or change.action == "stop":
        changes |= {"state": TaskState.STOPPING}
    else:
        changes |= {"state": TaskState.TRANSITIONING, "reason": change.reason}
    return task.model_copy(update=changes)


def _close(views: Views, plan: str, task: str, at: datetime, *, superseded_by: str = "") -> None:
    """Take a task from a plan's outstanding ones; the plan ends with its last."""
    view = views.plans.get(plan)
    if view is None or task not in view.outstanding:
        return
    outstanding = [name for name in view.outstanding if name != task]
    impact = view.impacts[task].model_copy(update={"closed_at": at})
    changes: dict[str, Any] = {"outstanding": outstanding, "impacts": {**view.impacts, task: impact}}
    if superseded_by:
        changes["superseded_by"] = superseded_by
    if not outstanding and view.state is PlanState.OUTSTANDING:
        changes["state"] = PlanState.SUPERSEDED if superseded_by or view.superseded_by else PlanState.DONE
    views.plans[plan] = view.model_copy(update=changes)


def _moved(views: Views, event: StateMoved) -> None:
    """Add a milestone to its plan, its task and the incidents that the plan heals."""
    plan = views.plans.get(event.plan)
    if plan is None:
        return
    milestone = Milestone(
        task=event.task,
        phase=event.phase,
        generation=event.generation,
        step=event.step,
        started_at=event.started_at,
        occurred_at=event.occurred_at,
        durations_s=event.durations_s,
        sources=event.sources,
        deal=event.deal,
        detail=event.detail,
    )
    changes: dict[str, Any] = {"milestones": [*plan.milestones, milestone]}
    if event.phase == "failed":
        changes["state"] = PlanState.FAILED
    views.plans[event.plan] = plan.model_copy(update=changes)
    task = views.tasks.get(event.task)
    if task is None or task.plan != event.plan or event.task not in plan.impacts:
        return  # a plan that has lost this task to another one
    _moved_impact(views, task, plan.impacts[event.task], event)
    views.tasks[event.task] = _moved_task(views.tasks[event.task], event)
    if event.complete and event.phase != "failed":
        _close(views, event.plan, event.task, event.occurred_at)
        _task(views, event.task, plan="")
    for incident in plan.incidents:
        refresh(views, incident)


def _moved_impact(views: Views, task: TaskView, impact: Impact, event: StateMoved) -> None:
    """Note the milestone's time; training under the plan before ends where this one stops or replaces it."""
    at = event.occurred_at
    changes: dict[str, Any] = {}
    if event.phase == "drained":
        changes["drained_at"] = at
    if event.phase == "resumed":
        changes["resumed_at"] = at
    if event.phase == "restored" or (event.phase == "resumed" and event.complete):
        changes["restored_at"] = at
    if _cleaned_up(task, event):
        changes["restored_at"] = impact.resumed_at or at
    if event.steps_recomputed:
        changes["steps_recomputed"] = max(impact.steps_recomputed, event.steps_recomputed)
    if event.phase in {"drained", "restored", "ended"} and task.training_plan not in {"", event.plan}:
        _impact(views, task.training_plan, event.task, until=at)
        _task(views, event.task, training_plan="")
    _impact(views, event.plan, event.task, **changes)
    if {"resumed_at", "restored_at"} & changes.keys():
        _task(views, event.task, training_plan=event.plan)


def _cleaned_up(task: TaskView, event: StateMoved) -> bool:
    """Tell whether this ends a plan whose members were at work already: what it released was all that was left."""
    return event.phase == "released" and event.complete and bool(task.planned)


def _moved_task(task: TaskView, event: StateMoved) -> TaskView:
    """Return the task after a milestone of the plan that has it."""
    changes: dict[str, Any] = {"pids": {**task.pids, **event.pids}}
    stopping = task.state is TaskState.STOPPING
    if event.phase in {"resumed", "restored"}:
        changes |= {"step": max(task.step, event.step), "generation": event.generation}
        for stage in task.stages:
            if stage.generation == event.generation:
                changes |= {"members": stage.members, "layout": stage.layout}
    if task.state in ENDED:
        return task.model_copy(update={"pids": {}} if event.phase == "ended" else changes)
    if event.phase in {"resumed", "restored"} and task.started_at is None:
        changes["started_at"] = event.started_at
    if stopping:
        return task.model_copy(update=changes)
    if event.phase == "restored" or (event.phase == "resumed" and event.complete) or _cleaned_up(task, event):
        count = len(task.planned)
        changes |= {"state": TaskState.RUNNING, "reason": "", "failed_workers": []}
        if count < task.strength:
            reason = f"{count} of {task.strength} workers since a fault"
            changes |= {"state": TaskState.DEGRADED, "reason": reason}
    elif event.phase == "resumed":
        reason = "survivors finished the interrupted step; full strength is being restored"
        changes |= {"state": TaskState.DEGRADED, "reason": reason}
    elif event.phase == "failed":
        changes |= {"state": TaskState.TRANSITIONING, "reason": f"a transition failed: {event.detail}"}
    elif event.phase == "ended":
        reason = task.queued_reason or "no workers for it now"
        changes |= {"state": TaskState.QUEUED, "reason": reason, "members": [], "pids": {}}
    elif task.state is not TaskState.DEGRADED:
        changes |= {"state": TaskState.TRANSITIONING}
    return task.model_copy(update=changes)
