"""The fold's part for what users ask of tasks that exist, and for what they say about incidents and other troubles."""

from __future__ import annotations

from shared.events.union import (
    IncidentAcknowledged,
    IncidentNoted,
    Recorded,
    TaskChanged,
    TaskDeleted,
    TroubleAcknowledged,
    TroubleEnded,
)
from shared.model import filled
from shared.projections import service_spans, spans
from shared.projections.documents import change_task
from shared.tasks.specification import ENDED
from shared.views.documents import ClusterView, TaskView, Views
from shared.views.incident_parts import Acknowledgement, Note, TakenCause
from shared.views.task_parts import AttemptView, Weighting, attempt_key


def changed(views: Views, recorded: Recorded, event: TaskChanged) -> None:
    """Give a task its new weight and limits. Everything that counts by weight counts by the new one from here on.

    The steps since the newest summary are among those of the new weight: the log does not know them yet.
    """
    task = views.tasks.get(event.task)
    if task is None or task.state in ENDED:
        return
    limits = task.spec.workers.model_copy(update={"min": event.min_workers, "max": event.max_workers})
    spec = task.spec.model_copy(update={"weight": event.weight, "workers": limits})
    before = task.spec.weight
    if event.weight != before:
        known = task.weightings or [Weighting(step=task.first_step, weight=before)]
        change_task(views, event.task, weightings=[*known, Weighting(step=task.step, weight=event.weight)])
    change_task(views, event.task, spec=spec, revision=recorded.stream_version)
    if event.weight != before:
        spans.reweigh_shortfalls(views, event.task, event.weight, recorded)
        service_spans.reweigh_healthy_line(views, event.task, event.weight / before, recorded)


def deleted(views: Views, recorded: Recorded, event: TaskDeleted) -> None:
    """Note that a task that has ended is not to be listed any more."""
    task = views.tasks.get(event.task)
    if task is not None and task.state in ENDED:
        change_task(views, event.task, deleted_at=recorded.recorded_at, revision=recorded.stream_version)


def keep_attempt(views: Views, task: TaskView) -> None:
    """Keep the outcome of a submission whose name is submitted again."""
    key = attempt_key(task.name, task.attempt)
    views.attempts.get(key)  # the table has to know the old outcome before it changes
    views.attempts[key] = attempt_of(task)


def attempt_of(task: TaskView) -> AttemptView:
    """Return a task's latest submission as an attempt."""
    return filled(
        AttemptView,
        task,
        task=task.name,
        number=task.attempt,
        checkpoint=task.start_checkpoint,
        last_step=task.step,
        generation=max((task.generation, *(stage.generation for stage in task.stages))),
        flop=task.flop(task.step) - task.earlier_flop,
        weighted_flop=task.weighted_flop(task.step) - task.earlier_weighted_flop,
    )


def noted(views: Views, recorded: Recorded, event: IncidentNoted) -> None:
    """Add a note to an incident."""
    view = views.incidents.get(event.incident)
    if view is not None:
        note = Note(text=event.text, by=event.actor, at=recorded.recorded_at)
        views.incidents[event.incident] = view.model_copy(update={"notes": [*view.notes, note]})


def acknowledged(views: Views, recorded: Recorded, event: IncidentAcknowledged) -> None:
    """Note who takes care of an incident: the first who said so."""
    view = views.incidents.get(event.incident)
    if view is not None and view.acknowledged is None:
        first = Acknowledgement(by=event.actor, at=recorded.recorded_at)
        views.incidents[event.incident] = view.model_copy(update={"acknowledged": first})


def taken(views: Views, recorded: Recorded, event: TroubleAcknowledged | TroubleEnded) -> None:
    """Note who takes care of a cause of trouble: the first who said so, until the cause is no more."""
    cluster = views.cluster.get("cluster", ClusterView())
    others = {key: one for key, one in cluster.taken.items() if key != event.key}
    if isinstance(event, TroubleAcknowledged):
        first = TakenCause(by=event.actor, at=recorded.recorded_at, event_id=event.event_id)
        others[event.key] = cluster.taken.get(event.key, first)
    views.cluster["cluster"] = cluster.model_copy(update={"taken": others})
