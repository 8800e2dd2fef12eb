"""Plans in the fold of the log: what a plan changes when it is made, and what its execution reports."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from services.planner.placement.transition_costs import kind_of_change
from services.planner.state.cluster import HardwareLayout, State, Task, Wait, node_of, without
from services.planner.state.usable_nodes import usable_workers
from services.planner.throughput.tables import remembered_tables
from shared.events.plans import Stage, TaskChange
from shared.events.union import PlanDecided, StateMoved

GENERATIONS_REMEMBERED = 16
"""Number of generations of a task whose hardware and layout are remembered. A generation trains on while a few later
generations are superseded before they form, but never while many are."""


def make_plan(state: State, event: PlanDecided, at: datetime) -> State:
    """Return the state once the plan is made: members, stages and waits of all tasks."""
    tables = remembered_tables(state.tables, event)
    state = state.model_copy(update={"plans": state.plans + 1, "tables": tables, "beside": ()})
    for change in event.changes:
        task = state.find(change.task)
        if task is not None:
            state = state.with_task(_changed(state, task, change, event.plan, at))
    queued = event.queued
    for name, task in state.tasks.items():
        if not queued and not task.queued and task.wait is None:
            continue  # almost all plans leave almost all tasks as they are
        reason = queued.get(name, "")
        wait = _wait(task, event, at)
        if task.queued != reason or task.wait != wait:
            state = state.with_changed(name, queued=reason, wait=wait)
    return state


def _wait(task: Task, event: PlanDecided, at: datetime) -> Wait | None:
    """Return the task's wait once the plan is made: it begins, goes on or ends; a wait that starved ends in a turn."""
    wait = task.wait
    if task.name in event.queued:
        return wait if wait is not None and wait.ended_at is None else Wait(since=at, cause=event.event_id)
    if wait is None or wait.ended_at is not None:
        return wait
    return wait.model_copy(update={"ended_at": at}) if wait.called_at is not None else None


def _existing(state: State, workers: Iterable[str]) -> list[str]:
    """Return the workers that their nodes have. A new incarnation may have fewer than the one before."""
    nodes = state.nodes
    return [w for w in workers if (node := nodes.get(node_of(w))) is not None and w in node.workers]


def _changed(state: State, task: Task, change: TaskChange, plan: str, at: datetime) -> Task:
    """Return the task once the plan is made. The plan answers all losses up to now."""
    stage = change.target or change.interrupted
    moves = change.action in ("move", "none") and stage is not None
    members = tuple(member.worker for member in stage.members) if stage is not None and moves else ()
    numbers = [s.generation for s in change.stages]
    processes = dict.fromkeys((*members, *change.survivors, *change.failed, *change.release))
    usable = usable_workers(state.nodes)
    live = stage is None or any(member.source == "live" for member in stage.members)
    return task.model_copy(
        update={
            "generation": max((task.generation, *numbers)),
            "members": members,
            "owners": tuple(change.survivors) if live or _divides_model(stage) else (),
            "ranks": {worker: task.ranks[worker] for worker in change.survivors if live and worker in task.ranks},
            "occupied": tuple(sorted(processes if usable.issuperset(processes) else _existing(state, processes))),
            "trained": _trained(state, task, change),
            "lost": (),
            "broken": False,
            "plan": plan,
            "planned_at": at,
            "change": change,
            "layout": stage.layout if stage is not None else task.layout,
            "shares": tuple(stage.shares) if stage is not None and moves else (),
            "idle_since": at if change.hold or change.action == "pause" else None,
            "idle_s": 0.0,
        }
    )


def _divides_model(stage: Stage | None) -> bool:
    """Return whether each worker of the stage has only a shard of the model.

    A process that keeps running while the layout becomes data-parallel has a shard, which is no whole state.
    """
    return stage is not None and stage.layout.world_size != stage.layout.data


def _trained(state: State, task: Task, change: TaskChange) -> dict[int, HardwareLayout]:
    """Return ``Task.trained`` with the stages of the plan."""
    trained = dict(task.trained)
    for stage in change.stages:
        layout, hardware = stage.layout, state.nodes[stage.members[0].node].hardware
        trained[stage.generation] = HardwareLayout(hardware, layout.tensor, layout.pipeline, layout.data)
    return {generation: trained[generation] for generation in sorted(trained)[-GENERATIONS_REMEMBERED:]}


def formed_stage(task: Task, generation: int) -> dict[str, Any]:
    """Return what changes of a task once a generation is known to train: its members have the task's state.

    While the survivors finish an interrupted step, a survivor that is no member of the step's stage keeps what it has.
    """
    if task.change is None:
        return {}
    stages = task.change.stages
    stage = next((s for s in stages if s.generation == generation), None)
    if stage is None:
        return {}
    ranks = {member.worker: member.rank for member in stage.members}
    if stage is not stages[-1] and not ranks.keys() >= set(task.owners):
        return {}
    return {"owners": tuple(ranks), "state_layout": stage.layout, "ranks": ranks}


def execute_phase(state: State, event: StateMoved) -> State:
    """Return the state after a phase of the newest plan's execution has ended for one task."""
    task = state.tasks.get(event.task)
    if task is None or task.change is None or task.plan != event.plan:
        return state
    changes = _after_phase(task, task.change, event)
    if event.complete and event.phase != "failed":
        state = _measure(state, task, task.change, event)
        members = set(task.members)
        owners = tuple(worker for worker in changes.get("owners", task.owners) if worker in members)
        changes |= {"change": None, "occupied": tuple(sorted(task.members)), "owners": owners}
    return state.with_task(task.model_copy(update=changes)) if changes else state


def _after_phase(task: Task, change: TaskChange, event: StateMoved) -> dict[str, Any]:
    """Return what changes of a task once a phase has ended."""
    changes: dict[str, Any] = {}
    if event.phase in ("resumed", "restored"):
        changes = formed_stage(task, event.generation)
    if event.phase in ("resumed", "restored", "ended") and event.step > 0 and task.life != "ended":
        changes["step"] = event.step
    if event.phase == "drained":
        changes["idle_since"] = task.idle_since or event.occurred_at
    if event.phase == "resumed":
        changes |= {"idle_since": None, "idle_s": task.idle_s + _idle_s(task, event)}
    if event.phase in ("drained", "released"):
        # A release follows the drain at once, whatever plan comes: its workers do not have the state any more.
        changes["owners"] = without(task.owners, change.release)
    if event.phase == "released":
        changes["occupied"] = without(task.occupied, without(change.release, task.members))
    return changes


def _idle_s(task: Task, event: StateMoved) -> float:
    """Return the seconds without progress up to this event, since the task left its step or the phase began."""
    return max(0.0, (event.occurred_at - (task.idle_since or event.started_at)).total_seconds())


def _measure(state: State, task: Task, change: TaskChange, event: StateMoved) -> State:
    """Return the state with one more measured transition: the seconds without progress.

    Time in which the task trained does not count: the survivors finish their step and go on until the newcomers are up.
    A change that had to wait is not measured, since it does not show what a transition takes.
    """
    kind = kind_of_change(change)
    if kind is None or change.not_before is not None:
        return state
    number, total_s = state.transitions.get(kind, (0, 0.0))
    measured = (number + 1, total_s + task.idle_s + _idle_s(task, event))
    return state.model_copy(update={"transitions": {**state.transitions, kind: measured}})
