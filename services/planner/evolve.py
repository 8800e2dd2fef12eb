"""evolve: the planner's state after one event. Pure: the time comes in with the event.

Events of tasks are folded here, those of nodes in ``nodes.py``, plans and their execution in ``execution.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from services.planner.execution import execute_phase, formed_stage, make_plan
from services.planner.state.admission import present_wait
from services.planner.state.blame import blamed_node, blamed_task, blamed_workers, is_stale
from services.planner.state.cluster import State, Task, Unwritten
from services.planner.state.nodes import (
    adopt_node,
    cordon_node,
    count_incident,
    drain_node,
    join_node,
    leave_node,
    lose_node,
    lose_workers,
    note_injected,
    return_node,
)
from services.planner.state.slow_workers import is_slowed, slow_worker
from services.planner.throughput.corrections import forget_rates, measure
from shared.events import union as events
from shared.events.evidence import Evidence
from shared.events.severities import ErrorKind, Severity
from shared.events.union import EventBase


def evolve(state: State, event: EventBase, at: datetime) -> State:
    """Return the state after ``event``. ``at``: when the event, or the cause of a plan, was recorded."""
    fold = _FOLDS.get(type(event))
    return state if fold is None else fold(state, event, at)


def _configured(state: State, event: events.ClusterConfigured, at: datetime) -> State:
    before = state.parameter("worker_flop_per_s")
    state = state.model_copy(update={"config": event})
    return state if state.parameter("worker_flop_per_s") == before else forget_rates(state)


def _submitted(state: State, event: events.TaskSubmitted, at: datetime) -> State:
    old = state.find(event.spec.name)
    number = len(state.tasks) + len(state.ended) if old is None else old.number
    task = Task(
        spec=event.spec, step=event.step, checkpoint=event.checkpoint, checkpoint_step=event.step, number=number
    )
    if old is not None:
        kept = ("model", "model_known", "batch", "parallel")
        same = all(getattr(old.spec, name) == getattr(event.spec, name) for name in kept)
        task = task.model_copy(
            update={
                "generation": old.generation,
                "occupied": old.occupied,
                "plan": old.plan,
                "planned_at": old.planned_at,
                "change": old.change if old.change is not None and old.change.action == "end" else None,
                "measured": old.measured if same else {},
            }
        )
    return state.with_task(task)


def _changed(state: State, event: events.TaskChanged, at: datetime) -> State:
    task = state.find(event.task)
    if task is None or task.life == "ended":
        return state
    limits = task.spec.workers.model_copy(update={"min": event.min_workers, "max": event.max_workers})
    return state.with_changed(event.task, spec=task.spec.model_copy(update={"weight": event.weight, "workers": limits}))


def _stop_requested(state: State, event: events.TaskStopRequested, at: datetime) -> State:
    task = state.find(event.task)
    if task is None or task.life == "ended":
        return state
    lose_steps, at_once = task.lose_steps or event.lose_steps, task.at_once or event.at_once
    return state.with_changed(event.task, life="stopping", lose_steps=lose_steps, at_once=at_once)


def _stop_refused(state: State, event: events.TaskStopRefused, at: datetime) -> State:
    """Let a task that could not be saved train on with the workers that it has; or stop it in another way."""
    task = state.find(event.task)
    if task is None or task.life == "ended" or task.change is None or task.plan != event.plan:
        return state
    if task.lose_steps:
        return state.with_changed(event.task, change=None)
    return state.with_changed(event.task, life="active", change=None, members=task.live_owners)


def _starving(state: State, event: events.TaskStarving, at: datetime) -> State:
    task = state.find(event.task)
    wait = present_wait(task)
    if wait is None or wait.since != event.since:
        return state
    return state.with_changed(event.task, wait=wait.model_copy(update={"called_at": at, "cause": event.event_id}))


def _ended(state: State, event: events.TaskFinished | events.TaskFailed, at: datetime) -> State:
    return state.with_changed(
        event.task, life="ended", members=(), owners=(), lost=(), broken=False, queued="", step=event.step
    )


def _stopped(state: State, event: events.TaskStopped, at: datetime) -> State:
    task = state.find(event.task)
    if task is None or task.life == "ended":
        return state
    saved = {"checkpoint": event.path, "checkpoint_step": event.step} if event.path else {}
    if task.life == "active" and task.change is not None and task.change.action == "pause":
        # The release follows at once, whatever plan comes, since no worker has the state any more.
        return state.with_changed(event.task, step=event.step, owners=(), **saved)
    ended = {"life": "ended", "members": (), "owners": (), "lost": (), "broken": False, "queued": ""}
    return state.with_changed(event.task, step=event.step, **ended, **saved)


def _progressed(state: State, event: events.TaskProgressed, at: datetime) -> State:
    task = state.find(event.task)
    if task is None or task.life == "ended":
        return state
    changes = formed_stage(task, event.generation)
    changes["step"] = event.step
    layout = task.trained.get(event.generation)
    if event.memory_every is not None:
        changes["memory_every"] = event.memory_every
    if event.step_s > 0.0:
        changes["step_s"] = event.step_s
        # The table has what a task achieves without slow workers; their slowdown is counted apart from it.
        if layout is not None and not task.shares and not is_slowed(state, task):
            changes["measured"] = measure(state, task, layout, event.step_s)
    return state.with_task(task.model_copy(update=changes))


def _checkpointed(state: State, event: events.TaskCheckpointed, at: datetime) -> State:
    task = state.find(event.task)
    if task is None or event.step < task.checkpoint_step:
        return state
    return state.with_changed(event.task, checkpoint=event.path, checkpoint_step=event.step)


def _resume_requested(state: State, event: events.TaskResumeRequested, at: datetime) -> State:
    return state.with_changed(event.task, needs_operator="", unwritten=None) if event.task in state.tasks else state


def _result_unwritten(state: State, event: events.TaskResultUnwritten, at: datetime) -> State:
    """Take the workers of a task that cannot write its result, until its time to try again has come."""
    task = state.tasks.get(event.task)
    if task is None or task.life != "active" or task.leaving:
        return state
    if event.ended:
        return state.with_changed(event.task, unwritten=None)
    if not task.members or event.generation != task.generation:
        return state
    why = Unwritten(reason=event.reason, retry_at=event.retry_at, cause=event.event_id, worker=event.worker)
    return state.with_changed(event.task, unwritten=why, home=task.members)


def _error(state: State, event: events.ErrorDetected, at: datetime) -> State:
    name = blamed_node(event)
    state = count_incident(state, event)
    if event.answered_with is not None:
        state = state.model_copy(update={"beside": (*state.beside, event.incident)})
    why = Evidence.read(event.evidence).needs_operator
    if why and (given_up := blamed_task(state, event)) is not None:
        state = state.with_changed(given_up.name, needs_operator=f"{event.kind.value}: {why}")
    if event.severity is Severity.SEV1 and name is not None:
        return lose_node(state, name, event, at)
    task = blamed_task(state, event)
    if task is None or is_stale(task, event):
        return state
    if event.severity is Severity.SEV3:
        return state.with_changed(task.name, broken=bool(task.members or task.owners))
    if event.kind is ErrorKind.DIFFERENCE and Evidence.read(event.evidence).rule == "task":
        state = state.with_changed(task.name, closed=str(event.evidence.get("detail", "")) or event.kind.value)
    return lose_workers(state, blamed_workers(task, event), task.name)


def _moved(state: State, event: events.StateMoved, at: datetime) -> State:
    return execute_phase(state, event)


_FOLDS: dict[type[EventBase], Callable[[State, Any, datetime], State]] = {
    events.ClusterConfigured: _configured,
    events.TaskSubmitted: _submitted,
    events.TaskChanged: _changed,
    events.TaskStopRequested: _stop_requested,
    events.TaskResumeRequested: _resume_requested,
    events.TaskStarving: _starving,
    events.TaskFinished: _ended,
    events.TaskFailed: _ended,
    events.TaskStopped: _stopped,
    events.TaskStopRefused: _stop_refused,
    events.TaskProgressed: _progressed,
    events.TaskResultUnwritten: _result_unwritten,
    events.TaskCheckpointed: _checkpointed,
    events.NodeJoined: join_node,
    events.NodeAdopted: adopt_node,
    events.NodeLeft: leave_node,
    events.NodeCordoned: cordon_node,
    events.NodeDraining: drain_node,
    events.NodeReturned: return_node,
    events.ErrorDetected: _error,
    events.FaultInjected: note_injected,
    events.WorkerSlowed: slow_worker,
    events.PlanDecided: make_plan,
    events.StateMoved: _moved,
}
