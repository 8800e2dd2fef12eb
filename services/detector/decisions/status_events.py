"""Events that are no errors: nodes that join or leave, and the rates, checkpoints, stops and results of tasks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from services.detector.incidents.faults import SERVICE
from services.detector.progress import recording, unwritten_results
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.task import MonitoredTask
from shared.events import union as events
from shared.events.node_events import CheckResult
from shared.events.union import Event, derived_id
from shared.messages.signals import (
    PHASES,
    Heartbeat,
    RankCheckpointed,
    RankCheckpointFailed,
    RankCopies,
    RankFinished,
    RankIdentified,
    RankSignals,
    RankStopped,
    StorageReturned,
    WorkerStatus,
)
from shared.model import filled


def node_joined(
    heartbeat: Heartbeat, cause: str, now: datetime, self_test: Sequence[CheckResult] = ()
) -> events.NodeJoined:
    """Return the event of a node that offers workers.

    Args:
        heartbeat: the node's newest heartbeat.
        cause: the node's incarnation or, if the node returns, the id of the error event that declared it lost.
        now: the time.
        self_test: what the node's self-test found, if it was isolated.
    """
    return filled(
        events.NodeJoined,
        heartbeat,
        event_id=derived_id(cause, SERVICE, "joined"),
        occurred_at=now,
        workers=[w.worker for w in heartbeat.workers],
        self_test=list(self_test),
    )


def node_adopted(node: MonitoredNode, heartbeat: Heartbeat, now: datetime) -> events.NodeAdopted:
    """Return the event of a node whose agent has a successor, which has sent its first heartbeat."""
    return events.NodeAdopted(
        event_id=derived_id(heartbeat.incarnation, SERVICE, "adopted"),
        occurred_at=now,
        node=node.name,
        incarnation=heartbeat.incarnation,
        predecessor=node.incarnation,
        agent_pid=heartbeat.agent_pid,
        probe=heartbeat.probe,
    )


def node_returned(node: MonitoredNode, error: Event, now: datetime) -> events.NodeReturned:
    """Return the event of a node that was isolated for a failure which a later error shows to follow its task."""
    return events.NodeReturned(
        event_id=derived_id(error.event_id, SERVICE, f"{node.name} returned"),
        occurred_at=now,
        node=node.name,
        incarnation=node.incarnation,
        actor=SERVICE,
    )


def node_left(node: MonitoredNode, reason: str, now: datetime) -> events.NodeLeft:
    """Return the event of a node that leaves in order. A node joins once before it leaves."""
    return events.NodeLeft(
        event_id=derived_id(node.joined, SERVICE, "left"),
        occurred_at=now,
        node=node.name,
        incarnation=node.incarnation,
        reason=reason,
    )


def of_rank(
    task: MonitoredTask, status: WorkerStatus, interval_s: float, now: datetime
) -> events.TaskProgressed | None:
    """Learn a task's step and rate from the status of its rank 0; return a summary when one is due.

    Times without progress are learnt from every rank, except once a fault has been found or while a plan is in
    progress: a rank may then have waited for another that hangs.

    Args:
        task: the step and the durations of its steps are changed in place.
        status: of a member, in the task's generation.
        interval_s: shortest time between two summaries of a generation (``progress.py``).
        now: the time.
    """
    if status.state != "training":
        return None
    if task.change is None and not task.unanswered:
        for phase, seconds in status.gaps_s.items():
            if phase in PHASES:  # steps of a newer agent are of no use
                task.gaps.note(status.worker, phase, seconds)
    if status.rank != 0:
        return None
    task.step = max(task.step, status.step)
    if status.step_s is not None and status.steps_timed > task.timed:
        task.timed = status.steps_timed
        task.durations_s.append(status.step_s)
        task.gaps.note_step(status.steps_timed, status.step_s)
    return task_progressed(task, status, now) if recording.is_due(task, status.step, interval_s, now) else None


def before_fault(state: DetectorState, error: events.ErrorDetected, now: datetime) -> list[events.TaskProgressed]:
    """Return the summaries of the tasks that a fault interrupts, up to the fault."""
    tasks = [state.tasks[error.task]] if error.task in state.tasks else []
    if error.node is not None:
        tasks += [task for task in state.tasks.values() if task not in tasks and task.workers_on(error.node)]
    return [task_progressed(task, None, now) for task in tasks if recording.is_unrecorded(task)]


def task_progressed(task: MonitoredTask, status: WorkerStatus | None, now: datetime) -> events.TaskProgressed:
    """Return the summary of a task's recent steps. At least one step must have been timed.

    Args:
        task: the task.
        status: of its rank 0, if that is what the summary is made for.
        now: the time.
    """
    return events.TaskProgressed(
        event_id=derived_id(f"{task.name}/{task.generation}/{task.step}", SERVICE, "progressed"),
        occurred_at=now,
        task=task.name,
        generation=task.generation,
        step=task.step,
        workers=len(task.members),
        step_s=statistics.median(task.durations_s),
        loss=status.loss if status is not None else None,
        memory_every=status.memory_every if status is not None else None,
        replicated=status.replicated if status is not None else None,
    )


def stop_refused(task: MonitoredTask, moved: events.StateMoved, now: datetime) -> events.TaskStopRefused:
    """Return the event of a task that could not be saved, and so was not stopped.

    Args:
        task: the task.
        moved: how the plan to stop it failed.
        now: the time.
    """
    return events.TaskStopRefused(
        event_id=derived_id(moved.event_id, SERVICE, "stop-refused"),
        occurred_at=now,
        task=task.name,
        generation=task.generation,
        step=max(task.step, moved.step),
        plan=moved.plan,
        # The part for people: the failure's code and phase come before it.
        reason=moved.detail.split(": ", 2)[-1],
    )


def of_signal(task: MonitoredTask, signal: RankSignals, now: datetime) -> Event | None:
    """Return the event of a signalled identity, checkpoint, stop or result; None for other signals.

    The answer is also None for the failure of a checkpoint, or a lack of copies in memory, of a kind that the log has
    already.
    """
    place: dict[str, Any] = {"task": signal.task, "generation": signal.generation, "step": signal.step}
    place["occurred_at"] = min(signal.occurred_at, now)
    # The id derives from the thing itself, so that signals of several agents about it make one event.
    cause = f"{signal.task}/{signal.generation}/{signal.step}"
    match signal:
        case RankIdentified() if not task.identity:
            before = task.identity_before
            changed = [
                f"{name}: {before[name]} -> {value}"
                for name, value in sorted(signal.identity.items())
                if before.get(name, value) != value
            ]
            return events.TaskIdentified(
                event_id=derived_id(f"{signal.task}/{signal.generation}", SERVICE, "identified"),
                identity=signal.identity,
                changed=changed,
                **place,
            )
        case RankCheckpointed():
            event_id = derived_id(f"{cause}/{signal.path}", SERVICE, "checkpointed")
            return events.TaskCheckpointed(event_id=event_id, path=signal.path, **place)
        case RankCheckpointFailed() if signal.lends and unwritten_results.may_lend(task):
            return unwritten_results.unwritten(task, signal, now)
        case RankCheckpointFailed() if recording.is_new(task.checkpoint_failures, signal.reason):
            return events.TaskCheckpointFailed(
                event_id=derived_id(f"{cause}/{signal.worker}/{signal.reason}", SERVICE, "checkpoint-failed"),
                worker=signal.worker,
                reason=signal.reason,
                **place,
            )
        case RankCopies() if recording.is_lack_to_report(task, signal):
            return events.TaskCopiesLacking(
                event_id=derived_id(f"{cause}/{signal.worker}/{signal.lack}", SERVICE, "copies"),
                worker=signal.worker,
                reason=signal.lack,
                ended=not signal.lack,
                **place,
            )
        case StorageReturned():
            return unwritten_results.returned(task, signal, now)
        case RankStopped():
            return events.TaskStopped(event_id=derived_id(cause, SERVICE, "stopped"), path=signal.path, **place)
        case RankFinished():
            return events.TaskFinished(
                event_id=derived_id(cause, SERVICE, "finished"),
                samples_sha256=signal.samples_sha256,
                parameters_path=signal.parameters_path,
                loss=signal.loss,
                worker=signal.worker,
                **place,
            )
    return None
