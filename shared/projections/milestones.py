"""The fold's part for milestones: state-moved events, which report how far a plan has come for a task."""

from __future__ import annotations

from typing import Any

from shared.events.union import StateMoved
from shared.model import filled
from shared.projections import incidents
from shared.projections.documents import change_impact, change_task, close_plan
from shared.tasks.specification import ENDED, TaskState
from shared.views.documents import Impact, Milestone, PlanState, TaskView, Views


def moved(views: Views, event: StateMoved) -> None:
    """Add a milestone to its plan; change the task and the incidents that the plan answers."""
    plan = views.plans.get(event.plan)
    if plan is None:
        return
    milestone = filled(Milestone, event)
    changes: dict[str, Any] = {"milestones": [*plan.milestones, milestone]}
    if event.phase == "failed":
        changes["state"] = PlanState.FAILED
    views.plans[event.plan] = plan.model_copy(update=changes)
    task = views.tasks.get(event.task)
    if task is None or task.plan != event.plan or event.task not in plan.impacts:
        return  # another plan has taken over this task
    _moved_impact(views, task, plan.impacts[event.task], event)
    views.tasks[event.task] = _moved_task(views.tasks[event.task], event)
    if event.complete and event.phase != "failed":
        close_plan(views, event.plan, event.task, event.occurred_at)
        change_task(views, event.task, plan="")
    for incident in plan.incidents:
        incidents.refresh(views, incident)


def _moved_impact(views: Views, task: TaskView, impact: Impact, event: StateMoved) -> None:
    """Note the milestone's time; training under an earlier plan ends where this plan stops or replaces it."""
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
        change_impact(views, task.training_plan, event.task, until=at)
        change_task(views, event.task, training_plan="")
    if "restored_at" in changes and not impact.before:
        change_task(views, event.task, start_s=max((changes["restored_at"] - impact.planned_at).total_seconds(), 0.0))
    change_impact(views, event.plan, event.task, **changes)
    if {"resumed_at", "restored_at"} & changes.keys():
        change_task(views, event.task, training_plan=event.plan)


def _cleaned_up(task: TaskView, event: StateMoved) -> bool:
    """Return whether a release ends the plan while its members train: nothing but the release was left to do."""
    return event.phase == "released" and event.complete and bool(task.planned)


def _moved_task(task: TaskView, event: StateMoved) -> TaskView:
    """Return the task after a milestone of its present plan."""
    changes: dict[str, Any] = {"pids": {**task.pids, **event.pids}}
    stopping = task.state is TaskState.STOPPING
    if event.phase in {"prepared", "restored", "failed"}:
        changes["wait"] = None
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
