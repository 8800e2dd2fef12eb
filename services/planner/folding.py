"""evolve: the planner's state after one event. Pure; time comes in with the event."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from services.planner.admission import waits
from services.planner.corrections import forget_rates, measure
from services.planner.state import Node, Size, State, Task, Wait, node_of
from services.planner.transitions import kind_of
from shared.events import (
    ClusterConfigured,
    ErrorDetected,
    EventBase,
    NodeJoined,
    PlanDecided,
    StateMoved,
    TaskCheckpointed,
    TaskFailed,
    TaskFinished,
    TaskProgressed,
    TaskStarving,
    TaskStopped,
    TaskStopRequested,
    TaskSubmitted,
)
from shared.plans import TaskChange
from shared.severities import Severity


def evolve(state: State, event: EventBase, at: datetime) -> State:
    """Return the state after ``event``, which was recorded at ``at`` (for a plan: when its cause was)."""
    fold = _FOLDS.get(type(event))
    return state if fold is None else fold(state, event, at)


def _with_task(state: State, task: Task) -> State:
    return state.model_copy(update={"tasks": {**state.tasks, task.name: task}})


def _update(state: State, name: str, **changes: Any) -> State:
    task = state.tasks.get(name)
    return state if task is None else _with_task(state, task.model_copy(update=changes))


def _configured(state: State, event: ClusterConfigured, at: datetime) -> State:
    before = state.parameter("worker_flop_per_s")
    state = state.model_copy(update={"config": event})
    return state if state.parameter("worker_flop_per_s") == before else forget_rates(state)


def _submitted(state: State, event: TaskSubmitted, at: datetime) -> State:
    old = state.tasks.get(event.spec.name)
    task = Task(spec=event.spec, step=event.step, checkpoint=event.checkpoint, checkpoint_step=event.step)
    if old is not None:
        same = all(getattr(old.spec, name) == getattr(event.spec, name) for name in ("model", "batch", "parallel"))
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
    return _with_task(state, task)


def _stop_requested(state: State, event: TaskStopRequested, at: datetime) -> State:
    task = state.tasks.get(event.task)
    if task is None or task.life != "active":
        return state
    return _update(state, event.task, life="stopping")


def _starving(state: State, event: TaskStarving, at: datetime) -> State:
    task = state.tasks.get(event.task)
    wait = waits(task)
    if wait is None or wait.since != event.since:
        return state
    return _update(state, event.task, wait=wait.model_copy(update={"called_at": at, "cause": event.event_id}))


def _ended(state: State, event: TaskFinished | TaskFailed, at: datetime) -> State:
    return _update(
        state, event.task, life="ended", members=(), holders=(), lost=(), broken=False, queued="", step=event.step
    )


def _stopped(state: State, event: TaskStopped, at: datetime) -> State:
    task = state.tasks.get(event.task)
    if task is None or task.life == "ended":
        return state
    saved = {"checkpoint": event.path, "checkpoint_step": event.step} if event.path else {}
    if task.life == "active" and task.change is not None and task.change.action == "pause":
        return _update(state, event.task, step=event.step, **saved)
    ended = {"life": "ended", "members": (), "holders": (), "lost": (), "broken": False, "queued": ""}
    return _update(state, event.task, step=event.step, **ended, **saved)


def _progressed(state: State, event: TaskProgressed, at: datetime) -> State:
    task = state.tasks.get(event.task)
    if task is None or task.life == "ended":
        return state
    timed = {"step_s": event.step_s} if event.step_s > 0.0 else {}
    state = _update(state, event.task, step=event.step, **timed)
    size = task.trained.get(event.generation)
    if timed and size is not None:
        state = _update(state, event.task, measured=measure(state, task, size, event.step_s))
    return _formed(state, event.task, event.generation)


def _checkpointed(state: State, event: TaskCheckpointed, at: datetime) -> State:
    task = state.tasks.get(event.task)
    if task is None or event.step < task.checkpoint_step:
        return state
    return _update(state, event.task, checkpoint=event.path, checkpoint_step=event.step)


def _formed(state: State, name: str, generation: int) -> State:
    """Return the state knowing that this generation trains: its members hold the task's state.

    While the survivors finish a step, those of them that are not among its members hold what they held before.
    """
    task = state.tasks[name]
    stages = task.change.stages if task.change else []
    stage = next((s for s in stages if s.generation == generation), None)
    if stage is None:
        return state
    ranks = {member.worker: member.rank for member in stage.members}
    if stage is not stages[-1] and not ranks.keys() >= set(task.holders):
        return state
    return _update(state, name, holders=tuple(ranks), held=stage.layout, ranks=ranks)


def _joined(state: State, event: NodeJoined, at: datetime) -> State:
    old = state.nodes.get(event.node)
    if old is not None and old.usable and old.incarnation == event.incarnation:
        return state
    if old is not None and old.usable:
        state = _lose_workers(_observe(state, old, at), old.workers)
    node = Node(
        name=event.node,
        incarnation=event.incarnation,
        domain=event.domain,
        workers=tuple(event.workers),
        usable=True,
        since=at,
        hardware=event.hardware,
    )
    tasks = {
        name: task.model_copy(update={"occupied": tuple(w for w in task.occupied if node_of(w) != node.name)})
        for name, task in state.tasks.items()
    }
    nodes = {**state.nodes, node.name: node}
    return state.model_copy(update={"nodes": nodes, "tasks": tasks, "kinds": _counted(state.kinds, old, node)})


def _counted(kinds: dict[str, dict[int, int]], old: Node | None, new: Node) -> dict[str, dict[int, int]]:
    """Return ``State.kinds`` with a node in place of what it was before."""
    kinds = {kind: dict(sizes) for kind, sizes in kinds.items()}
    for node, change in ((old, -1), (new, 1)):
        if node is not None:
            sizes = kinds.setdefault(node.hardware, {})
            sizes[len(node.workers)] = sizes.get(len(node.workers), 0) + change
    return {kind: {k: n for k, n in sizes.items() if n} for kind, sizes in kinds.items() if any(sizes.values())}


def _observe(state: State, node: Node, at: datetime) -> State:
    return state.model_copy(update={"node_s": state.node_s + (at - node.since).total_seconds()})


def _error(state: State, event: ErrorDetected, at: datetime) -> State:
    name = blamed_node(event)
    state = _blamed(state, event)
    if event.severity is Severity.SEV1 and name is not None:
        return _lose_node(state, name, event, at)
    task = blamed_task(state, event)
    if task is None or is_stale(task, event):
        return state
    if event.severity is Severity.SEV3:
        return _update(state, task.name, broken=bool(task.members or task.holders))
    return _lose_workers(state, blamed_workers(task, event), task.name)


def _blamed(state: State, event: ErrorDetected) -> State:
    """Return the state with one more incident of the node, if it is a new one of consequence.

    An escalation to SEV1 comes from a SEV2 that counts already.
    """
    name = blamed_node(event)
    counted = event.severity is Severity.SEV1 and event.escalates is not None
    if name is None or event.severity is Severity.SEV3 or counted:
        return state
    return state.model_copy(update={"incidents": {**state.incidents, name: state.incidents.get(name, 0) + 1}})


def _lose_node(state: State, name: str, event: ErrorDetected, at: datetime) -> State:
    node = state.nodes.get(name)
    if node is None or not node.usable:
        return state
    state = _observe(state, node, at)
    gone = node.model_copy(update={"usable": False, "since": at, "reason": f"{event.kind.value} ({event.incident})"})
    state = state.model_copy(update={"nodes": {**state.nodes, name: gone}, "losses": state.losses + 1})
    return _lose_workers(state, node.workers)


def _lose_workers(state: State, workers: Iterable[str], name: str | None = None) -> State:
    """Return the state with these workers' processes lost to the named task, or to whatever task has them."""
    gone = set(workers)
    for task in state.tasks.values():
        if name is not None and task.name != name:
            continue
        hit = tuple(worker for worker in dict.fromkeys((*task.holders, *task.members)) if worker in gone)
        if hit and task.life != "ended":
            state = _update(state, task.name, lost=(*task.lost, *_without(hit, task.lost)), broken=True)
    return state


def blamed_node(event: ErrorDetected) -> str | None:
    """Return the node that an error names, by itself or by its worker."""
    if event.node is not None:
        return event.node
    return node_of(event.worker) if event.worker is not None else None


def blamed_task(state: State, event: ErrorDetected) -> Task | None:
    """Return the task that an error is about: the one named, else the one that has the worker."""
    task = state.tasks.get(event.task) if event.task is not None else None
    if event.task is None and event.worker is not None:
        having = [t for t in state.tasks.values() if event.worker in (*t.holders, *t.members)]
        task = having[0] if having else None
    return task if task is not None and task.life != "ended" else None


def blamed_workers(task: Task, event: ErrorDetected) -> list[str]:
    """Return the workers of the task whose processes an error condemns.

    Those it names (``worker``, and ``workers`` in the evidence). Where it names none: at SEV2 all but the lowest
    rank, so that the state survives if the cause lies elsewhere; at SEV1 all, since that has failed too.
    """
    named = event.evidence.get("workers")
    workers = [event.worker] if event.worker is not None else []
    if isinstance(named, list):
        workers += [worker for worker in named if isinstance(worker, str) and worker not in workers]
    if workers:
        return workers
    everyone = list(dict.fromkeys((*task.holders, *task.members)))
    spare_lowest = event.severity is Severity.SEV2 and task.replica == 1
    return [w for w in everyone if not (spare_lowest and w in task.kept[:1])]


def is_stale(task: Task, event: ErrorDetected) -> bool:
    """Return whether a broken link belongs to a generation that has been replaced already: it broke with that."""
    return event.severity is Severity.SEV3 and event.generation is not None and event.generation < oldest_live(task)


def oldest_live(task: Task) -> int:
    """Return the oldest generation that may still count: that of the newest plan's first stage.

    Where survivors are not held they train on in the one before until all is ready, and may still break there.
    """
    change = task.change
    if change is not None and change.survivors and not change.hold and change.interrupted is None:
        return change.from_generation
    stages = change.stages if change is not None else []
    return stages[0].generation if stages else task.generation


def _planned(state: State, event: PlanDecided, at: datetime) -> State:
    state = state.model_copy(update={"plans": state.plans + 1})
    for change in event.changes:
        task = state.tasks.get(change.task)
        if task is not None:
            changed = _changed(task, change, event.plan, at)
            there = tuple(worker for worker in changed.occupied if _exists(state, worker))
            trained = _trained(state, task, change)
            state = _with_task(state, changed.model_copy(update={"occupied": there, "trained": trained}))
    for task in state.tasks.values():
        reason = event.queued.get(task.name, "")
        wait = _wait(task, event, at)
        if task.queued != reason or task.wait != wait:
            state = _update(state, task.name, queued=reason, wait=wait)
    return state


def _wait(task: Task, event: PlanDecided, at: datetime) -> Wait | None:
    """Return the task's wait once the plan is made: it begins, goes on, or ends; if it was too long, in a turn."""
    wait = task.wait
    if task.name in event.queued:
        return wait if wait is not None and wait.ended_at is None else Wait(since=at, cause=event.event_id)
    if wait is None or wait.ended_at is not None:
        return wait
    return wait.model_copy(update={"ended_at": at}) if wait.called_at is not None else None


def _exists(state: State, worker: str) -> bool:
    """Return whether its node has such a worker: a new incarnation may have fewer than the one before."""
    node = state.nodes.get(node_of(worker))
    return node is not None and worker in node.workers


def _changed(task: Task, change: TaskChange, plan: str, at: datetime) -> Task:
    """Return the task once the plan is made. What was lost is answered now."""
    stage = change.target or change.interrupted
    moves = change.action in ("move", "none") and stage is not None
    members = tuple(member.worker for member in stage.members) if stage is not None and moves else ()
    numbers = [s.generation for s in change.stages]
    processes = dict.fromkeys((*members, *change.survivors, *change.failed, *change.release))
    # Processes that keep running while the layout becomes data-parallel hold shards, which are no whole state.
    live = stage is None or any(member.source == "live" for member in stage.members)
    whole = live or (stage is not None and stage.layout.world_size != stage.layout.data)
    return task.model_copy(
        update={
            "generation": max((task.generation, *numbers)),
            "members": members,
            "holders": tuple(change.survivors) if whole else (),
            "ranks": {worker: task.ranks[worker] for worker in change.survivors if live and worker in task.ranks},
            "occupied": tuple(sorted(processes)),
            "lost": (),
            "broken": False,
            "plan": plan,
            "planned_at": at,
            "change": change,
            "layout": stage.layout if stage is not None else task.layout,
            "stands_since": at if change.hold or change.action == "pause" else None,
            "stood_s": 0.0,
        }
    )


GENERATIONS_REMEMBERED = 16
"""Of each task. A generation trains on while a few later ones are superseded before they form; not for many."""


def _trained(state: State, task: Task, change: TaskChange) -> dict[int, Size]:
    """Return ``Task.trained`` with the stages of the plan."""
    trained = dict(task.trained)
    for stage in change.stages:
        layout, hardware = stage.layout, state.nodes[stage.members[0].node].hardware
        trained[stage.generation] = Size(hardware, layout.tensor, layout.pipeline, layout.data)
    return {generation: trained[generation] for generation in sorted(trained)[-GENERATIONS_REMEMBERED:]}


def _moved(state: State, event: StateMoved, at: datetime) -> State:
    task = state.tasks.get(event.task)
    if task is None or task.change is None or task.plan != event.plan:
        return state
    change = task.change
    if event.phase in ("resumed", "restored", "ended") and event.step > 0 and task.life != "ended":
        state = _update(state, event.task, step=event.step)
    if event.phase == "drained":
        state = _update(state, event.task, stands_since=task.stands_since or event.occurred_at)
    if event.phase == "resumed":
        stood_s = task.stood_s + _stood_s(task, event)
        state = _update(state, event.task, stands_since=None, stood_s=stood_s)
    if event.phase in ("resumed", "restored"):
        state = _formed(state, event.task, event.generation)
    if event.phase == "released":
        staying = _without(task.occupied, [w for w in change.release if w not in task.members])
        state = _update(state, event.task, occupied=staying)
    if not event.complete or event.phase == "failed":
        return state
    state = _measure(state, task, event)
    holders = tuple(worker for worker in state.tasks[event.task].holders if worker in task.members)
    return _update(state, event.task, change=None, occupied=tuple(sorted(task.members)), holders=holders)


def _stood_s(task: Task, event: StateMoved) -> float:
    """Return how long the task stood still up to this event: since it left its step, or since its last phase began."""
    return max(0.0, (event.occurred_at - (task.stands_since or event.started_at)).total_seconds())


def _measure(state: State, task: Task, event: StateMoved) -> State:
    """Return the state with one more measured transition: how long the task stood still, seconds.

    What it trained meanwhile is not lost: the survivors finish their step and go on until those who join are up.
    """
    kind = kind_of(task.change) if task.change is not None else None
    if kind is None:
        return state
    number, total_s = state.transitions.get(kind, (0, 0.0))
    measured = (number + 1, total_s + task.stood_s + _stood_s(task, event))
    return state.model_copy(update={"transitions": {**state.transitions, kind: measured}})


def _without(workers: Iterable[str], gone: Iterable[str]) -> tuple[str, ...]:
    left_out = set(gone)
    return tuple(worker for worker in workers if worker not in left_out)


_FOLDS: dict[type[EventBase], Callable[[State, Any, datetime], State]] = {
    ClusterConfigured: _configured,
    TaskSubmitted: _submitted,
    TaskStopRequested: _stop_requested,
    TaskStarving: _starving,
    TaskFinished: _ended,
    TaskFailed: _ended,
    TaskStopped: _stopped,
    TaskProgressed: _progressed,
    TaskCheckpointed: _checkpointed,
    NodeJoined: _joined,
    ErrorDetected: _error,
    PlanDecided: _planned,
    StateMoved: _moved,
}
