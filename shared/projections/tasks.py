"""The fold's part for tasks: submission, progress, and end."""

from __future__ import annotations

from typing import Any

from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind
from shared.events.union import (
    ErrorDetected,
    Recorded,
    TaskFailed,
    TaskFinished,
    TaskProgressed,
    TaskResultUnwritten,
    TaskResumeRequested,
    TaskStopped,
    TaskStopRefused,
    TaskStopRequested,
    TaskSubmitted,
)
from shared.projections import incidents
from shared.projections.documents import change_impact, change_task, close_plan
from shared.projections.rates import with_sample
from shared.projections.requests import keep_attempt
from shared.tasks.specification import ENDED, TaskSpec, TaskState
from shared.views.documents import SHORTEST_STEP_S, TaskView, Views
from shared.views.task_parts import Result, StopRefusal, TaskWait


def submitted(views: Views, recorded: Recorded, event: TaskSubmitted) -> None:
    """Add a task; it takes the place of an ended one of the same name."""
    known = views.tasks.get(event.task)
    if known is not None:
        keep_attempt(views, known)
    views.tasks[event.task] = TaskView(
        name=event.task,
        position=recorded.position,
        version=recorded.stream_version,
        revision=recorded.stream_version,
        attempt=known.attempt + 1 if known else 1,
        submission_id=event.event_id,
        submitted_at=recorded.recorded_at,
        spec=event.spec,
        owner=event.actor,
        reason="waiting for the planner",
        step=event.step,
        first_step=event.step,
        demand=known.demand if known else "",
        progress=known.progress if known else "",
        counted_step=event.step,
        shortfalls=known.shortfalls if known else [],
        earlier_flop=known.flop(event.step) if known and event.checkpoint else 0.0,
        earlier_weighted_flop=known.weighted_flop(event.step) if known and event.checkpoint else 0.0,
        start_checkpoint=event.checkpoint,
        checkpoint=event.checkpoint,
        checkpoint_step=event.step if event.checkpoint else 0,
    )


def differs(views: Views, event: ErrorDetected) -> None:
    """Note why a task takes no new processes, once a second process differed from those that train."""
    if event.kind is ErrorKind.DIFFERENCE and event.task and Evidence.read(event.evidence).rule == "task":
        change_task(views, event.task, newcomers_refused=str(event.evidence.get("detail", "")))


def given_up(views: Views, event: ErrorDetected) -> None:
    """Note that a task is not tried any further until its operator resumes it."""
    why = Evidence.read(event.evidence).needs_operator
    if why and event.task:
        change_task(views, event.task, wait=TaskWait(reason=why, until=None))


def resume_requested(views: Views, recorded: Recorded, event: TaskResumeRequested) -> None:
    """Note that a user wants a task that waits to be tried at once."""
    change_task(views, event.task, wait=None, unwritten=False, revision=recorded.stream_version)


def result_unwritten(views: Views, event: TaskResultUnwritten) -> None:
    """Note that a task waits without workers until it can write its result, or that it is to try again."""
    wait = None if event.ended else TaskWait(reason=f"waits for its storage: {event.reason}", until=event.retry_at)
    change_task(views, event.task, wait=wait, unwritten=not event.ended)


def progressed(views: Views, event: TaskProgressed) -> None:
    """Take over step, step time and loss, unless they are of an older generation."""
    task = views.tasks.get(event.task)
    if task is None or event.generation < task.generation:
        return
    change_task(
        views,
        event.task,
        step=max(task.step, event.step),
        step_s=event.step_s if event.step_s >= SHORTEST_STEP_S else task.step_s,
        rates=with_sample(task, event.workers, event.step_s),
        loss=task.loss if event.loss is None else event.loss,
        memory_every=task.memory_every if event.memory_every is None else event.memory_every,
        replicated=task.replicated if event.replicated is None else event.replicated,
    )


def _result(task: TaskView, event: TaskFinished) -> Result:
    """Return the result of a task that has finished. Rank 0 has written it, even if the event does not say so."""
    first = next((member.worker for member in task.members if member.rank == 0), "")
    return Result(
        steps=event.step,
        samples_sha256=event.samples_sha256,
        parameters_path=event.parameters_path,
        generation=event.generation,
        node=(event.worker or first).rpartition("/")[0],
    )


def stop_requested(views: Views, recorded: Recorded, event: TaskStopRequested) -> None:
    """Note that a user wants the task to stop."""
    task = views.tasks.get(event.task)
    if task is None or task.state in ENDED:
        return
    change_task(
        views,
        event.task,
        state=TaskState.STOPPING,
        reason="asked to stop",
        revision=recorded.stream_version,
        stop_refused=None,
        lose_steps=task.lose_steps or event.lose_steps,
        at_once=task.at_once or event.at_once,
    )


def stop_refused(views: Views, recorded: Recorded, event: TaskStopRefused) -> None:
    """Take a task that could not be saved back to training, unless it is to stop in any case."""
    task = views.tasks.get(event.task)
    if task is None or task.state is not TaskState.STOPPING or task.plan != event.plan or task.lose_steps:
        return
    close_plan(views, task.plan, event.task, event.occurred_at)
    change_task(
        views,
        event.task,
        state=TaskState.RUNNING,
        revision=recorded.stream_version,
        reason=f"not stopped, since its state cannot be saved: {event.reason}",
        stop_refused=StopRefusal(step=event.step, reason=event.reason, at=event.occurred_at),
        plan="",
        planned=[member.worker for member in task.members],
        strength=len(task.members),
    )


def _stopped_reason(task: TaskView, event: TaskStopped) -> str:
    """Return how a task has stopped, and what is left of it, in words."""
    step, saved_step = max(task.step, event.step), event.step if event.path else task.checkpoint_step
    if task.at_once:
        left = (
            f"the newest checkpoint is of step {saved_step}, and later steps are lost"
            if saved_step
            else "nothing is saved"
        )
        return f"ended at once as asked: {left}"
    if step == 0 and not task.spec.restarts_whole:
        return "stopped as asked, before its first step"
    if step == saved_step:
        return f"stopped as asked, saved at step {saved_step}"
    if task.spec.restarts_whole:
        return "stopped as asked; what is saved, its script knows"
    saved = f"the newest checkpoint is of step {saved_step}" if saved_step else "there is no checkpoint"
    return f"stopped as asked, not saved: {saved}, and {step - saved_step} steps are lost"


def _finished_reason(spec: TaskSpec, step: int) -> str:
    if spec.ends_early_at(step):
        return f"its script has ended behind step {step} of {spec.steps}"
    return "all steps done" if spec.steps_known else "its script has ended"


def ended(views: Views, recorded: Recorded, event: TaskStopped | TaskFinished | TaskFailed) -> None:
    """End a task, its training time, and what an outstanding plan had left to do for it.

    A task that is paused does not end: ``TaskStopped`` then only reports that its state was saved.
    """
    task = views.tasks.get(event.task)
    if task is None:
        return
    if isinstance(event, TaskStopped) and event.path:
        change_task(views, event.task, checkpoint=event.path, checkpoint_step=event.step)
    if isinstance(event, TaskStopped) and task.pausing and task.state is not TaskState.STOPPING:
        change_impact(views, task.training_plan, event.task, until=event.occurred_at)
        change_task(views, event.task, step=event.step, training_plan="")
        return
    changes: dict[str, Any] = {"ended_at": event.occurred_at, "step": event.step, "training_plan": ""}
    changes["revision"] = recorded.stream_version
    match event:
        case TaskStopped():
            changes |= {"state": TaskState.STOPPED, "reason": _stopped_reason(task, event)}
        case TaskFinished():
            result = _result(task, event)
            loss = task.loss if event.loss is None else event.loss
            reason = _finished_reason(task.spec, event.step)
            changes |= {"state": TaskState.SUCCEEDED, "reason": reason, "result": result, "loss": loss}
        case TaskFailed():
            changes |= {"state": TaskState.FAILED, "reason": event.reason, "traceback": event.traceback}
    change_impact(views, task.training_plan, event.task, until=event.occurred_at)
    if task.plan and task.state is not TaskState.STOPPING:
        close_plan(views, task.plan, event.task, event.occurred_at)
        changes["plan"] = ""
    change_task(views, event.task, **changes)
    if isinstance(event, TaskFailed):
        incidents.failed(views, event.incident, event.task, event.reason, event.occurred_at)
