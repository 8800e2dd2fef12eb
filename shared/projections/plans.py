"""The fold's part for decided plans: what each plan does to its tasks, and which incidents it answers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from shared.events.plans import TaskChange, Trigger
from shared.events.union import PlanDecided, Recorded
from shared.model import filled
from shared.projections import incidents, observed, spans
from shared.projections.documents import change_impact, change_task, close_plan
from shared.projections.rates import modelled_rates, rate_flop_per_s
from shared.tasks.specification import ENDED, TaskState
from shared.views.documents import Impact, PlanState, PlanView, TaskView, Views
from shared.views.task_parts import TaskWait


def decided(views: Views, recorded: Recorded, event: PlanDecided) -> None:
    """Add a plan: the tasks that it changes move to it from the plans that were not done with them."""
    at = recorded.recorded_at
    answered = _answered_incidents(views, event)
    slowdowns = observed.answered(views, event)
    impacts = _take_tasks(views, event, recorded.position, at)
    if event.trigger is not Trigger.ERROR and event.solution is not None:
        for name, count in event.solution.assignment.items():
            _set_strength(views, name, count)
    for name, reason in event.queued.items():
        _queue(views, name, reason, moved=name in impacts)
    views.plans[event.plan] = filled(
        PlanView,
        event,
        id=event.plan,
        position=recorded.position,
        decided_at=at,
        incidents=answered,
        state=PlanState.OUTSTANDING if impacts else PlanState.DONE,
        outstanding=sorted(impacts),
        impacts=impacts,
        since=_since(views, answered, impacts, at, event.cause),
        detected_at=max((when for i in answered for when in _detected(views, i, event.cause)), default=None),
        solved=event.solution is not None,
        gain_flop_per_s=_gain_flop_per_s(event),
        slowdowns=slowdowns,
    )
    for incident in answered:
        incidents.planned(views, incident, event, at)


def _detected(views: Views, incident: str, cause: str) -> Iterator[datetime]:
    """Yield when an incident was detected, and when the attempt that is the cause of a plan was."""
    view = views.incidents.get(incident)
    if view is not None:
        yield view.detected_at
        yield from (one.detected_at for one in view.attempts if one.event == cause)


def _since(views: Views, answered: list[str], impacts: dict[str, Impact], at: datetime, cause: str) -> datetime:
    """Return the time from which the plan claims time: of the fault, if no earlier plan has answered it for a task.

    A further attempt is a fault of its own, which no earlier plan has answered. ``cause``: the plan's cause.
    """
    since = at
    for view in (views.incidents.get(incident) for incident in answered):
        if view is not None:
            since = min([since, *(one.occurred_at for one in view.attempts[1:] if one.event == cause)])
            before = {task for plan in view.plans for task in views.plans[plan].impacts}
            if any(impact.faulted and task not in before for task, impact in impacts.items()):
                since = min(since, view.occurred_at)
    return since


def _gain_flop_per_s(event: PlanDecided) -> float | None:
    """Return the plan's WAF above that of the alternative in which only the failed tasks shrink."""
    other = next((s for s in event.alternatives if s.label == "only-faulted-shrinks"), None)
    if event.solution is None or other is None:
        return None
    return event.solution.total_waf_flop_per_s - other.total_waf_flop_per_s


def _answered_incidents(views: Views, event: PlanDecided) -> list[str]:
    """Return the plan's own incidents and those that the superseded plans have not healed."""
    answered = [event.incident, *event.beside] if event.incident else []
    for superseded in event.supersedes:
        if (old := views.plans.get(superseded)) is not None:
            answered += [i for i in old.incidents if i not in answered and _is_open(views, i)]
    return answered


def _is_open(views: Views, incident: str) -> bool:
    view = views.incidents.get(incident)
    return view is not None and view.closed_at is None


def _take_tasks(views: Views, event: PlanDecided, position: int, at: datetime) -> dict[str, Impact]:
    """Move the tasks that the plan changes to it; return its impact on each."""
    impacts: dict[str, Impact] = {}
    for change in event.changes:
        task = views.tasks.get(change.task)
        if task is None or not _acts(change):
            continue
        count = len(_workers_after(change, task.planned))
        task = task.model_copy(update={"modelled": modelled_rates(task, event, count)})
        impact = _impact(change, task, at)
        impacts[change.task] = impact
        if task.plan:
            close_plan(views, task.plan, change.task, at, superseded_by=event.plan)
        if impact.faulted:
            change_impact(views, task.training_plan, change.task, until=at)
        views.tasks[change.task] = _planned_task(task, change, event)
        if event.trigger is Trigger.ERROR and event.incident is not None:
            spans.begin_shortfalls(views, impact, [*event.beside, event.incident], position, at)
    return impacts


def _acts(change: TaskChange) -> bool:
    """Return whether the transition has anything to do for this task."""
    return bool(
        change.interrupted or change.target or change.hold or change.failed or change.release or change.prepare
    ) or change.action in {"stop", "pause", "end"}


def _workers_after(change: TaskChange, before: list[str]) -> list[str]:
    """Return the workers that the task is to have when the plan is done."""
    if change.action in {"stop", "pause", "end"}:
        return []
    stage = change.target or change.interrupted
    if stage is not None:
        return [member.worker for member in stage.members]
    return [] if change.failed or change.hold else before


def _impact(change: TaskChange, task: TaskView, at: datetime) -> Impact:
    after = _workers_after(change, task.planned)
    rate, rate_after = rate_flop_per_s(task, len(task.planned)), rate_flop_per_s(task, len(after) or len(task.planned))
    return Impact(
        task=change.task,
        before=task.planned,
        after=after,
        survivors=change.survivors,
        faulted=bool(change.failed or change.hold or change.interrupted),
        planned_at=at,
        step_s=task.update_flop / rate_after if rate_after else 0.0,
        waf_flop_per_s=task.spec.weight * rate,
        weight=task.spec.weight,
        step=task.step,
        saved_step=task.checkpoint_step,
        step_before_s=task.update_flop / rate if rate else 0.0,
        start_s=task.start_s,
    )


def _planned_task(task: TaskView, change: TaskChange, event: PlanDecided) -> TaskView:
    """Return the task as it is from the plan on, until the first milestone."""
    after = _workers_after(change, task.planned)
    strength = max(task.strength, len(task.planned)) if event.trigger is Trigger.ERROR else len(after)
    changes: dict[str, Any] = {
        "plan": event.plan,
        "planned": after,
        "pausing": change.action == "pause",
        "stages": change.stages,
        "strength": strength,
        "failed_workers": change.failed,
        "queued_reason": event.queued.get(task.name, ""),
        "wait": _wait(task, change),
    }
    if task.state in ENDED:
        return task.model_copy(update={"plan": event.plan, "planned": []})
    if task.state is TaskState.STOPPING or change.action == "stop":
        changes |= {"state": TaskState.STOPPING}
    else:
        changes |= {"state": TaskState.TRANSITIONING, "reason": change.reason}
    return task.model_copy(update=changes)


def _wait(task: TaskView, change: TaskChange) -> TaskWait | None:
    """Return why no process of the task is started now; a task that is given up waits until it is resumed."""
    if change.not_before is not None:
        return TaskWait(reason=change.reason, until=change.not_before)
    lasts = task.wait is not None and (task.wait.until is None or task.unwritten)
    return task.wait if change.action == "pause" and lasts else None


def _set_strength(views: Views, name: str, count: int) -> None:
    """Set a task's full strength to the count that the solver gave it for another reason than a fault."""
    task = views.tasks.get(name)
    if task is None or task.state in ENDED:
        return
    change_task(views, name, strength=count)
    if task.state is TaskState.DEGRADED and not task.plan:
        change_task(views, name, state=TaskState.RUNNING, reason="")


def _queue(views: Views, name: str, reason: str, *, moved: bool) -> None:
    """Note why a task waits; it is queued unless it has started, or the plan changes it (``moved``)."""
    task = views.tasks.get(name)
    if task is None or task.state in ENDED:
        return
    change_task(views, name, queued_reason=reason)
    if not moved and task.state in {TaskState.PENDING, TaskState.QUEUED}:
        change_task(views, name, state=TaskState.QUEUED, reason=reason)
