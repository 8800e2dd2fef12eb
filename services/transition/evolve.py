"""The folds of the transition service: ``evolve`` takes the state over an event, ``hear`` over any other input.

No clock, no randomness, no I/O. ``decide`` folds its own state-moved events at once with ``fold_moved``, which ignores
one that comes again. So a restarted service folds the log, decides, and goes on where the log ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from services.transition.moved_events import moved_phase
from services.transition.phases import ENDINGS, before, kept, to_release
from services.transition.state import Failure, Outcome, Part, Phase, Replied, Send, State, Task, TimerFired, TimerName
from shared.events import union as events
from shared.events.codes import FailureCode
from shared.events.plans import Stage, TaskChange
from shared.events.severities import ErrorKind
from shared.events.union import EventBase
from shared.messages.commands import Reply
from shared.model import filled


def hear(state: State, item: Replied | TimerFired) -> State:
    """Return the state after a reply or a timer."""
    match item:
        case Replied():
            return _replied(state, item)
        case TimerFired(plan=plan, task=task, name=name):
            part = state.task(task).part
            return state if part is None or part.plan != plan else _fired(state, part, name)


def _fired(state: State, part: Part, name: TimerName) -> State:
    """Fold that a timer of a part has run out, or that a user does not want to wait for it."""
    return state.with_part(replace(part, fired=part.fired | {name})) if part.active else state


def fold_moved(state: State, event: events.StateMoved) -> State:
    """Fold a state-moved event. An event of a superseded plan, or one that was folded before, changes nothing."""
    part = state.task(event.task).part
    if part is None or part.plan != event.plan or event.phase in part.moved:
        return state
    state = _moved_step(state, event)
    part = replace(part, moved=part.moved | {event.phase})
    if event.phase == "failed":
        return state.with_part(part.ended(Outcome.FAILED))
    occupied = state.task(event.task).occupied
    for phase in Phase:
        if moved_phase(part, phase) == event.phase:
            part = replace(part, done=part.done | before(phase) | {phase})
    if event.phase == "prepared":
        occupied = occupied | state.alive(part.change.prepare)
        part = replace(part, ready=part.ready | set(part.change.prepare))
        state = state.with_leaving(event.task, drop=part.change.prepare)
    elif event.phase == "drained":
        state = state.with_leaving(event.task, add=to_release(state, part))  # the release of its workers follows
    elif event.phase == "released":
        occupied = occupied.difference(to_release(state, part))
    if event.complete:
        occupied = set(state.alive(kept(part)))
        part = part.ended(Outcome.DONE)
    return state.with_part(part).with_occupied(event.task, occupied)


# ---- the log


def evolve(state: State, event: EventBase, at: datetime) -> State:
    """Return the state after an event of the log. ``at``: when it was recorded; nothing here depends on that."""
    match event:
        case events.PlanDecided():
            for change in event.changes:
                state = _planned(state, event, change)
            return state
        case events.StateMoved():
            return fold_moved(state, event)
        case events.TaskSubmitted():
            return _submitted(state, event)
        case events.TaskProgressed(task=task, step=step) | events.TaskCheckpointed(task=task, step=step):
            return state.with_step(task, step)
        case events.TaskIdentified(task=name, identity=identity) if name in state.tasks:
            return state.with_task(name, replace(state.tasks[name], identity=identity))
        case events.TaskStopRequested(task=task, lose_steps=True):
            return state.with_task(task, replace(state.tasks[task], may_lose=True)) if task in state.tasks else state
        case events.TaskResumeRequested(task=task):
            part = state.task(task).part
            return state if part is None else _fired(state, part, TimerName.BACK_OFF)
        case events.TaskFinished() | events.TaskFailed():
            return _task_ended(state, event.task, unfinished=isinstance(event, events.TaskFailed))
        case events.TaskStopped():
            return _task_ended(_saved(state, event.task), event.task, stopped=True, unfinished=True)
        case events.ErrorDetected():
            if event.task is not None and event.step is not None:
                state = state.with_step(event.task, event.step)
            if event.kind is not ErrorKind.NODE_LOST or not event.node:
                return state
            # An escalation has the kind of the error before it, and the agent of its node lives.
            return _node_lost(state if event.escalates else _with_away(state, event.node), event.node)
        case events.NodeJoined():
            return _node_joined(state, event)
        case events.NodeAdopted():
            return _node_adopted(state, event)
        case events.NodeReturned():
            return _node_returned(state, event)
        case events.NodeLeft(node=node, incarnation=incarnation):
            if state.incarnations.get(node) != incarnation:
                return state
            return _node_lost(_with_away(state, node), node)
        case _:
            return state


def _planned(state: State, plan: events.PlanDecided, change: TaskChange) -> State:
    """Give the task a part of the plan, in place of the part that it has."""
    name = change.task
    task = state.task(name)
    generations = [stage.generation for stage in change.stages]
    generation = max([*generations, change.from_generation, task.generation])
    gone = tuple(sorted(task.leaving & set(change.survivors)))
    spared = _without(task, change, frozenset(gone)) if gone else None
    part = Part(plan=plan.plan, incident=plan.incident, change=spared or change, generation=generation)
    if gone and spared is None:
        detail = f"an earlier plan released {', '.join(gone)}"
        part = part.with_failure(Failure(Phase.HOLD, FailureCode.RELEASED, detail, gone))
    alive = state.alive([*change.survivors, *change.failed, *change.release])
    state = state.with_task(name, replace(task, generation=generation, stages=_entered(task)))
    return state.with_part(part).with_occupied(name, task.occupied | alive)


def _entered(task: Task) -> tuple[Stage, ...]:
    """Return the stages in which a task's ranks may be as a new plan comes: also those that the plan before has begun.

    A stage begins behind phases of which the log has at least one.
    """
    part = task.part
    if not task.stages or part is None or part.outcome is Outcome.DONE or not part.moved:
        return task.stages
    known = {stage.generation for stage in task.stages}
    return (*task.stages, *(stage for stage in part.change.stages if stage.generation not in known))


def _without(task: Task, change: TaskChange, gone: frozenset[str]) -> TaskChange | None:
    """Return a change that does without survivors that the plan before has released; None if it needs one of them.

    The planner decided before it knew of that release, such as where two nodes are drained at once. Of whole replicas
    the others finish the step, and whoever is to have no process afterwards has none already.
    """
    before, stage = task.part, change.interrupted
    if before is None or before.change.action in ENDINGS or task.spec is None:
        return None  # whoever was to save the state may be the only one that has it
    wanted = change.target if change.target is not None or change.action in ENDINGS else stage
    if wanted is not None and not gone.isdisjoint(member.worker for member in wanted.members):
        return None
    survivors = [worker for worker in change.survivors if worker not in gone]
    if stage is None:
        stored = wanted is not None and all(member.source not in ("live", "take") for member in wanted.members)
        return change.model_copy(update={"survivors": survivors}) if stored else None
    members = [member for member in stage.members if member.worker not in gone]
    if not members or stage.layout.world_size != stage.layout.data or task.spec.parallel.distributed_optimizer:
        return None
    members = [member.model_copy(update={"rank": rank}) for rank, member in enumerate(members)]
    layout = stage.layout.model_copy(update={"data": len(members)})
    interrupted = filled(Stage, stage, members=members, layout=layout, shares=[])
    return change.model_copy(update={"survivors": survivors, "interrupted": interrupted})


def _moved_step(state: State, event: events.StateMoved) -> State:
    if event.phase in ("resumed", "restored"):
        task = state.task(event.task)
        change = task.part.change if task.part is not None else None
        formed = [stage for stage in (change.stages if change else []) if stage.generation == event.generation]
        # Not the maximum: the task may have gone back to an older step, and computes the steps since then again.
        return state.with_task(event.task, replace(task, step=event.step, stages=tuple(formed)))
    return state.with_step(event.task, event.step)


def _submitted(state: State, event: events.TaskSubmitted) -> State:
    known = replace(state.task(event.task), ended=False, unfinished=False, may_lose=False, identity={})
    task = replace(known, spec=event.spec, step=event.step, resumes=event.resumes)
    if task.part is None or not task.part.active:
        # A task that reuses the name of an ended one starts without processes.
        task = replace(task, occupied=set(), leaving=frozenset())
    return state.with_task(event.task, task)


def _task_ended(state: State, name: str, *, stopped: bool = False, unfinished: bool = False) -> State:
    """Fold the end of a task, or of a pause. Its part is superseded, unless the plan itself ends the task."""
    part = state.task(name).part
    if part is not None and part.active and part.change.action not in ENDINGS:
        state = state.with_part(part.ended(Outcome.SUPERSEDED))
    paused = stopped and part is not None and part.change.action == "pause"
    return state.with_ended(name, paused=paused, unfinished=unfinished)


def _saved(state: State, task: str) -> State:
    """Fold an event of the log that says where the task's state was saved."""
    part = state.task(task).part
    return state if part is None or not part.active else state.with_part(replace(part, saved=True))


def _node_joined(state: State, event: events.NodeJoined) -> State:
    """Fold a node that joined. A new incarnation has no process of the incarnation before."""
    if state.incarnations.get(event.node) not in (None, event.incarnation):
        _vacate(state, event.node)
    state.incarnations[event.node], state.workers[event.node] = event.incarnation, tuple(event.workers)
    gone = {event.node}
    return replace(state, lost=state.lost - gone, away=state.away - gone)


def _node_adopted(state: State, event: events.NodeAdopted) -> State:
    """Fold a node that has another agent.

    The new agent has the processes of the one before, and gets its commands again.
    """
    if state.incarnations.get(event.node) != event.predecessor:
        return state
    state.incarnations[event.node] = event.incarnation
    return state


def _with_away(state: State, node: str) -> State:
    return replace(state, away=state.away | {node})


def _node_returned(state: State, event: events.NodeReturned) -> State:
    """Fold an isolated node that is used again. A node that has left, or is lost, has to join instead."""
    if event.node in state.away or state.incarnations.get(event.node) != event.incarnation:
        return state
    return replace(state, lost=state.lost - {event.node})


def _node_lost(state: State, node: str) -> State:
    """Fold a node that is lost or has left: its processes are gone, and nobody waits for its replies."""
    state = replace(state, lost=state.lost | {node})
    _vacate(state, node)
    for part in state.parts():
        for run in part.runs.values():
            gone = tuple(command_id for command_id, send in run.outstanding.items() if send.node == node)
            for command_id in gone:
                run.take(command_id)
            state = replace(state, cancelled=state.cancelled + gone) if gone else state
    return state


def _vacate(state: State, node: str) -> None:
    """Note that no task occupies a worker of the node."""
    for task in state.tasks.values():
        task.occupied.difference_update(state.workers.get(node, ()))


# ---- replies


def _replied(state: State, event: Replied) -> State:
    for part in state.parts():
        for phase, run in part.runs.items():
            if event.command_id in run.outstanding:
                return _phase_replied(state, part, phase, run.take(event.command_id), event.reply)
    return state


def _phase_replied(state: State, part: Part, phase: Phase, send: Send, reply: Reply | None) -> State:
    """Fold the reply to a command of the phase."""
    run = part.runs[phase]
    if reply is None or (not reply.ok and reply.code is FailureCode.TIMEOUT):
        run.silent += _to_blame(send.workers, reply)
        return state
    if not reply.ok:
        if reply.code is FailureCode.FENCED:
            return state.with_part(part.ended(Outcome.SUPERSEDED))
        code = reply.code or FailureCode.REFUSED
        # A task's checkpoint is the matter of all its nodes.
        where = "" if code is FailureCode.CHECKPOINT_FAILED else f"{send.node}: "
        failure = Failure(phase, code, f"{where}{reply.detail}", _to_blame(send.workers, reply))
        return state.with_part(part.with_failure(failure))
    run.replies.append(reply)
    return _phase_done(state, part, phase, send.workers)


def _phase_done(state: State, part: Part, phase: Phase, workers: Iterable[str]) -> State:
    """Fold what a phase has done on some workers: processes that are up, or gone."""
    if phase is Phase.PREPARE:
        part.ready.update(workers)
    if phase is Phase.STOP:
        # The workers leave from here on, not from the request on: ranks that cannot save their state do not exit.
        state = state.with_leaving(part.task, add=workers)
    if phase in (Phase.FREE, Phase.RELEASE, Phase.STOP):
        state.task(part.task).occupied.difference_update(workers)
    return state


def _to_blame(workers: tuple[str, ...], reply: Reply | None) -> tuple[str, ...]:
    """Return those of a failed command's workers that are to blame.

    A reply lists the workers that are not to blame: possibly all, if they lost a peer. Without such a list all workers
    are to blame.
    """
    if reply is None or not reply.workers:
        return workers
    return tuple(w for w in workers if w not in reply.workers)
