"""The fold's part for service levels: the progress of tasks, and the healthy line to measure it by.

The healthy line is the weighted FLOP/s of the best plan for the tasks present on all allocated workers. While no node
is away, the newest solver plan is that plan. While a node is away, no such plan is in the log: the line then has for
each task that is still there the best that a plan has given it since.
"""

from __future__ import annotations

from shared.events.base import EventBase
from shared.events.union import PlanDecided, Recorded, StateMoved, TaskChanged, TaskFailed, TaskFinished, TaskStopped
from shared.projections.spans import begin, end
from shared.tasks.specification import ENDED
from shared.views.documents import SpanKind, TaskView, Views


def follow_progress(views: Views, name: str, recorded: Recorded) -> None:
    """End a span of progress at each plan that the task trains on under, and at its end or change; begin the next.

    Each begins at the step at which the one before ended, so no step is counted twice, and none is left out. When a
    fault ends a span, the log knows the steps up to the newest summary; those behind it are known once the task trains
    again, and belong to the time before the fault.
    """
    task, event = views.tasks.get(name), recorded.event
    if task is None:
        return
    began = (
        isinstance(event, StateMoved) and event.phase in {"resumed", "restored"} and event.plan == task.training_plan
    ) or (isinstance(event, TaskChanged) and bool(task.progress))
    ended = task.state in ENDED or not task.training_plan or _is_interrupted(views, name, event)
    if (not began and not ended) or (ended and not task.progress):
        return
    if task.progress:
        span = views.spans[task.progress]
        end(views, span, recorded.recorded_at, last_step=max(task.step, span.first_step))
        interrupted = span.id if ended and task.state not in ENDED else ""
        task = task.model_copy(
            update={"counted_step": max(task.step, task.counted_step), "interrupted_progress": interrupted}
        )
    key = ""
    if not ended:
        task = _with_late_steps(views, task, recorded)
        fields = {"task": name, "first_step": task.counted_step, "flop_per_step": task.spec.weight * task.update_flop}
        key = begin(views, SpanKind.PROGRESS, name, recorded.position, recorded.recorded_at, **fields)
    views.tasks[name] = task.model_copy(update={"progress": key})


def _with_late_steps(views: Views, task: TaskView, recorded: Recorded) -> TaskView:
    """Add a span of the steps that were done before a fault, and that no summary has; return the task."""
    before = views.spans[task.interrupted_progress] if task.interrupted_progress else None
    if before is None or before.end is None:
        return task
    if task.step > task.counted_step:
        key = f"{recorded.position}/late-progress/{task.name}"
        changes = {"id": key, "position": recorded.position, "first_step": task.counted_step, "last_step": task.step}
        views.spans[key] = before.model_copy(update=changes)
    counted = max(task.step, task.counted_step)
    return task.model_copy(update={"counted_step": counted, "interrupted_progress": ""})


def _is_interrupted(views: Views, name: str, event: EventBase) -> bool:
    """Return whether an event is a plan that answers a fault of the task, which trains again from a milestone on."""
    plan = views.plans.get(event.plan) if isinstance(event, PlanDecided) else None
    return plan is not None and name in plan.impacts and plan.impacts[name].faulted


def follow_healthy_line(views: Views, recorded: Recorded) -> None:
    """Begin a span of the healthy line where a plan or the end of a task has changed it."""
    event = recorded.event
    if not isinstance(event, PlanDecided | TaskFinished | TaskFailed | TaskStopped):
        return
    cluster = views.cluster.get("cluster")
    if cluster is None:
        return
    known = views.spans[cluster.healthy] if cluster.healthy else None
    before = known.waf if known is not None else {}
    if isinstance(event, PlanDecided):
        if event.solution is None:
            return
        waf = {term.name: term.waf_flop_per_s for term in event.solution.terms}
        if cluster.away:
            waf = {name: max(rate, before.get(name, 0.0)) for name, rate in waf.items()}
    elif _has_ended(views, event.task):
        waf = {name: rate for name, rate in before.items() if name != event.task}
    else:
        return  # paused: ``task.stopped`` says that its state was saved
    if waf != before:
        _replace_healthy_line(views, waf, recorded)


def reweigh_healthy_line(views: Views, name: str, ratio: float, recorded: Recorded) -> None:
    """Have a task's part of the healthy line count by another weight. ``ratio``: the new weight over the old one."""
    cluster = views.cluster.get("cluster")
    before = views.spans[cluster.healthy].waf if cluster is not None and cluster.healthy else {}
    if name in before:
        _replace_healthy_line(views, {**before, name: before[name] * ratio}, recorded)


def _replace_healthy_line(views: Views, waf: dict[str, float], recorded: Recorded) -> None:
    cluster = views.cluster["cluster"]
    if cluster.healthy:
        end(views, views.spans[cluster.healthy], recorded.recorded_at)
    key = begin(views, SpanKind.HEALTHY, "", recorded.position, recorded.recorded_at, waf=waf) if waf else ""
    views.cluster["cluster"] = cluster.model_copy(update={"healthy": key})


def _has_ended(views: Views, name: str) -> bool:
    task = views.tasks.get(name)
    return task is None or task.state in ENDED
