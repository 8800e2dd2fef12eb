"""Events that state a fact without a judgement: a node joined, a task went on, saved, stopped or finished."""

from __future__ import annotations

import statistics
from datetime import datetime

from services.detector.faults import SERVICE
from services.detector.view import TaskView
from shared.events import (
    Event,
    NodeJoined,
    TaskCheckpointed,
    TaskFinished,
    TaskProgressed,
    TaskStopped,
    derived_id,
)
from shared.signals import Heartbeat, RankCheckpointed, RankFinished, RankStopped, Signal


def joined(heartbeat: Heartbeat, cause: str, now: datetime) -> NodeJoined:
    """Return the event of a node that offers workers; ``cause``: its incarnation, or the error that it returns from."""
    return NodeJoined(
        event_id=derived_id(cause, SERVICE, "joined"),
        occurred_at=now,
        node=heartbeat.node,
        incarnation=heartbeat.incarnation,
        agent_pid=heartbeat.agent_pid,
        domain=heartbeat.domain,
        hardware=heartbeat.hardware,
        workers=[w.worker for w in heartbeat.workers],
    )


def progressed(task: TaskView, loss: float | None, now: datetime) -> TaskProgressed:
    """Return the summary of a task's steps so far."""
    return TaskProgressed(
        event_id=derived_id(f"{task.name}/{task.generation}/{task.step}", SERVICE, "progressed"),
        occurred_at=now,
        task=task.name,
        generation=task.generation,
        step=task.step,
        workers=len(task.members),
        step_s=statistics.median(task.durations_s),
        loss=loss,
    )


def effect(signal: Signal, now: datetime) -> Event | None:
    """Return the event of a checkpoint, a stop or a result of the current generation."""
    at = min(signal.occurred_at, now)
    # Several agents' word for the same thing is one event: the id comes from the thing.
    cause = f"{signal.task}/{signal.generation}/{signal.step}"
    match signal:
        case RankCheckpointed():
            return TaskCheckpointed(
                event_id=derived_id(f"{cause}/{signal.path}", SERVICE, "checkpointed"),
                occurred_at=at,
                task=signal.task,
                generation=signal.generation,
                step=signal.step,
                path=signal.path,
            )
        case RankStopped():
            return TaskStopped(
                event_id=derived_id(cause, SERVICE, "stopped"),
                occurred_at=at,
                task=signal.task,
                generation=signal.generation,
                step=signal.step,
                path=signal.path,
            )
        case RankFinished():
            return TaskFinished(
                event_id=derived_id(cause, SERVICE, "finished"),
                occurred_at=at,
                task=signal.task,
                generation=signal.generation,
                step=signal.step,
                samples_sha256=signal.samples_sha256,
                parameters_path=signal.parameters_path,
                loss=signal.loss,
            )
    return None
