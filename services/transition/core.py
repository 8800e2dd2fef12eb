"""The core of the transition service: no clock, no randomness, no I/O.

``evolve`` folds an input (a record of the log, an agent's answer, a timer); ``decide`` returns what follows. What is
decided is folded at once, and folding it again when the log delivers it changes nothing: so a restarted service folds
the log, decides, and goes on where the log ends.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from services.transition.milestones import RANK_RAISED, failed, milestone, name_of
from services.transition.phases import (
    AFTER,
    ENDINGS,
    INTERRUPTED,
    asking,
    before,
    has_work,
    kept,
    may_drain,
    members,
    occupied,
    prepare_sends,
    promised,
    sends,
    stage_of,
    to_release,
    unready,
)
from services.transition.state import (
    Append,
    Cancel,
    Effect,
    Failure,
    Input,
    Logged,
    Outcome,
    Part,
    Phase,
    Replied,
    Run,
    State,
    Timer,
    TimerFired,
    TimerName,
    node_of,
)
from shared.commands import Reply
from shared.events import (
    ErrorDetected,
    Event,
    NodeJoined,
    PlanDecided,
    StateMoved,
    TaskCheckpointed,
    TaskFailed,
    TaskFinished,
    TaskProgressed,
    TaskStopped,
    TaskSubmitted,
)
from shared.plans import TaskChange
from shared.severities import ErrorKind

FENCED = "fenced"
TIMEOUT = "timeout"
NODE_LOST = "node-lost"

RELEASED = "released"
"""A plan counts on a process that an earlier plan has ended: it was made before that was known."""

KNOWN = frozenset({"process-exited", RANK_RAISED, NODE_LOST})
"""Codes of failures that an agent signals to the detector as well: the plan that answers the signal is likely on its
way, and reporting them here would count one fault twice."""


# ---- evolve


def evolve(state: State, event: Input) -> State:
    """Return the state after an input."""
    match event:
        case Logged(record=record):
            return _logged(state, record.event)
        case Replied():
            return _replied(state, event)
        case TimerFired(plan=plan, task=task, name=name):
            part = state.parts.get(task)
            if part is None or part.plan != plan or not part.active:
                return state
            return state.with_part(replace(part, fired=part.fired | {name}))


def _logged(state: State, event: Event) -> State:
    match event:
        case PlanDecided():
            for change in event.changes:
                state = _planned(state, event, change)
            return state
        case StateMoved():
            return _moved(state, event)
        case TaskSubmitted(task=task):
            part = state.parts.get(task)
            if part is None or not part.active:
                # A name that is used again starts with nothing.
                state = state.with_occupied(task, ()).with_leaving(task, drop=state.leaving.get(task, ()))
            specs, steps = {**state.specs, task: event.spec}, {**state.steps, task: event.step}
            return replace(state, specs=specs, steps=steps, ended=state.ended - {task})
        case TaskProgressed(task=task, step=step) | TaskCheckpointed(task=task, step=step):
            return state.with_step(task, step)
        case TaskFinished() | TaskFailed() | TaskStopped():
            return _task_ended(state, event.task)
        case ErrorDetected():
            if event.task is not None and event.step is not None:
                state = state.with_step(event.task, event.step)
            return _node_lost(state, event.node) if event.kind is ErrorKind.NODE_LOST and event.node else state
        case NodeJoined():
            return _node_joined(state, event)
        case _:
            return state


def _planned(state: State, plan: PlanDecided, change: TaskChange) -> State:
    """Take the task over from whatever plan had it."""
    task = change.task
    numbers = [stage.generation for stage in change.stages]
    generation = max([*numbers, change.from_generation, state.generations.get(task, 0)])
    part = Part(plan=plan.plan, incident=plan.incident, change=change, generation=generation)
    gone = sorted(state.leaving.get(task, frozenset()) & set(change.survivors))
    if gone:
        part = _failing(part, Phase.HOLD, RELEASED, f"an earlier plan released {', '.join(gone)}", tuple(gone))
    carrying = {*change.survivors, *change.failed, *change.release}
    alive = {w for w in carrying if node_of(w) not in state.lost}
    state = replace(state, generations={**state.generations, task: generation})
    return state.with_part(part).with_occupied(task, state.occupied.get(task, frozenset()) | alive)


def _moved(state: State, event: StateMoved) -> State:
    """Fold a milestone; one of an older plan says nothing any more."""
    part = state.parts.get(event.task)
    if part is None or part.plan != event.plan or event.phase in part.moved:
        return state
    state = _moved_step(state, event)
    part = replace(part, moved=part.moved | {event.phase})
    if event.phase == "failed":
        return state.with_part(part.ended(Outcome.FAILED))
    carrying = state.occupied.get(event.task, frozenset())
    for phase in Phase:
        if name_of(part, phase) == event.phase:
            part = replace(part, done=part.done | before(phase) | {phase})
    if event.phase == "prepared":
        carrying |= {w for w in part.change.prepare if node_of(w) not in state.lost}
        part = replace(part, ready=part.ready | set(part.change.prepare))
        state = state.with_leaving(event.task, drop=part.change.prepare)
    elif event.phase == "drained":
        state = state.with_leaving(event.task, add=to_release(state, part))  # that is what follows
    elif event.phase == "released":
        carrying -= set(to_release(state, part))
    if event.complete:
        carrying = frozenset(w for w in kept(part) if node_of(w) not in state.lost)
        part = part.ended(Outcome.DONE)
    return state.with_part(part).with_occupied(event.task, carrying)


def _moved_step(state: State, event: StateMoved) -> State:
    if event.phase in ("resumed", "restored"):
        # Not the newest ever: what was lost and is computed again does not count as known any more.
        return replace(state, steps={**state.steps, event.task: event.step})
    return state.with_step(event.task, event.step)


def _task_ended(state: State, task: str) -> State:
    """A task that has ended needs nothing but the ending that its plan may ask for."""
    state = replace(state, ended=state.ended | {task})
    part = state.parts.get(task)
    if part is None or not part.active or part.change.action in ENDINGS:
        return state
    return state.with_part(part.ended(Outcome.SUPERSEDED))


def _node_joined(state: State, event: NodeJoined) -> State:
    """A new incarnation has none of the processes of the one before."""
    if state.incarnations.get(event.node) not in (None, event.incarnation):
        state = _vacated(state, event.node)
    incarnations = {**state.incarnations, event.node: event.incarnation}
    return replace(state, incarnations=incarnations, lost=state.lost - {event.node})


def _vacated(state: State, node: str) -> State:
    for task, workers in state.occupied.items():
        state = state.with_occupied(task, (w for w in workers if node_of(w) != node))
    return state


def _node_lost(state: State, node: str) -> State:
    """Its processes are gone; nobody answers there."""
    state = _vacated(replace(state, lost=state.lost | {node}), node)
    for part in state.parts.values():
        gone = [cid for cid, send in part.outstanding().items() if send.node == node]
        for phase, run in part.runs.items():
            left = {cid: send for cid, send in run.outstanding.items() if send.node != node}
            part = part.with_run(phase, replace(run, outstanding=left))
        if gone:
            state = replace(state.with_part(part), cancelled=state.cancelled + tuple(gone))
    return state


def _replied(state: State, event: Replied) -> State:
    for part in state.parts.values():
        for phase, run in part.runs.items():
            if event.command_id in run.outstanding:
                return _answered(state, part, phase, event)
    return state


def _answered(state: State, part: Part, phase: Phase, event: Replied) -> State:
    run = part.runs[phase]
    send, reply = run.outstanding[event.command_id], event.reply
    left = {cid: other for cid, other in run.outstanding.items() if cid != event.command_id}
    run = replace(run, outstanding=left)
    if reply is None or (not reply.ok and reply.code == TIMEOUT):
        silent = _to_blame(send.workers, reply)
        return state.with_part(part.with_run(phase, replace(run, silent=run.silent + silent)))
    if not reply.ok:
        part = part.with_run(phase, run)
        if reply.code == FENCED:
            return state.with_part(part.ended(Outcome.SUPERSEDED))
        detail = f"{send.node}: {reply.detail}"
        blame = _to_blame(send.workers, reply)
        return state.with_part(_failing(part, phase, reply.code, detail, blame))
    part = part.with_run(phase, replace(run, replies=(*run.replies, reply)))
    state = state.with_part(part)
    if phase is Phase.PREPARE:
        return state.with_part(replace(part, ready=part.ready | set(send.workers)))
    if phase in (Phase.FREE, Phase.RELEASE, Phase.STOP):
        return state.with_occupied(part.task, state.occupied.get(part.task, frozenset()) - set(send.workers))
    return state


def _to_blame(workers: tuple[str, ...], reply: Reply | None) -> tuple[str, ...]:
    """Return those of a command's workers that did not do it; all, if the answer does not tell.

    An answer that lists all of them clears them: they lost a peer.
    """
    if reply is None or not reply.workers:
        return workers
    return tuple(w for w in workers if w not in reply.workers)


def _failing(part: Part, phase: Phase, code: str, detail: str, workers: tuple[str, ...]) -> Part:
    failure = Failure(phase, code or "refused", detail, workers, known=code in KNOWN)
    return replace(part, failures=(*part.failures, failure))


# ---- decide


def decide(state: State, at: datetime) -> tuple[State, list[Effect]]:
    """Return what is to be done now, and the state in which it is under way.

    ``at``: the time of the input that was folded last. Effects are to be performed in order; an ``Append`` is in
    the log before what follows it is sent, so that a restart never repeats what later commands have overtaken.
    """
    effects: list[Effect] = []
    progress = True
    while progress:
        progress = False
        for task in sorted(state.parts):
            # One task's release is what another one waits for.
            after, new = _advance(state, task, at)
            progress = progress or after is not state
            state = after
            effects += new
    effects += [Cancel(command_id) for command_id in state.cancelled]
    return replace(state, cancelled=()), effects


def _advance(state: State, task: str, at: datetime) -> tuple[State, list[Effect]]:
    """Take the next thing that one part can do; the same state if there is none."""
    part = state.parts[task]
    if not part.active:
        return state, []
    found = _new_failure(state, part)
    if found is not None:
        return state.with_part(found), []
    if part.failures:
        allowed = frozenset() if _broken(part) else INTERRUPTED
        if not allowed or INTERRUPTED <= part.done:
            return _fail(state, part, at)
    else:
        allowed = frozenset(Phase)
    for phase in Phase:
        if phase in part.done or phase not in allowed or not AFTER[phase] <= part.done:
            continue
        after, effects = _work(state, part, phase, at)
        if after is not state:
            return after, effects
    if not part.failures and part.done >= frozenset(Phase):
        return _finish(state, part, at)
    return state, []


def _work(state: State, part: Part, phase: Phase, at: datetime) -> tuple[State, list[Effect]]:
    """Begin a phase, go on with it, or end it."""
    run = part.runs.get(phase)
    if run is None:
        if phase is Phase.DRAIN and has_work(state, part, phase) and not may_drain(state, part):
            return state, []
        run = Run(started_at=at, outstanding={s.command.command_id: s for s in sends(state, part, phase)})
        if phase in (Phase.STOP, Phase.RELEASE):
            state = state.with_leaving(task=part.task, add=(w for s in run.outstanding.values() for w in s.workers))
        return state.with_part(part.with_run(phase, run)), list(run.outstanding.values())
    if phase is Phase.PREPARE and has_work(state, part, phase):
        new = prepare_sends(state, part)
        if new:
            run = replace(run, outstanding={**run.outstanding, **{s.command.command_id: s for s in new}})
            asked = {w for send in new for w in send.workers}
            carrying = state.occupied.get(part.task, frozenset()) | asked
            state = state.with_leaving(part.task, drop=asked)
            return state.with_part(part.with_run(phase, run)).with_occupied(part.task, carrying), list(new)
        waiting = any(node_of(w) not in state.lost for w in unready(part))
        if waiting and TimerName.WAIT not in part.timers and not asking(part):
            return _start_timer(state, part, TimerName.WAIT, state.limits.wait_s)
        if waiting:
            return state, []
    if run.outstanding:
        return state, []
    return _end_phase(state, part.with_run(phase, replace(run, ended_at=at)), phase, at)


def _end_phase(state: State, part: Part, phase: Phase, at: datetime) -> tuple[State, list[Effect]]:
    moved = name_of(part, phase)
    if moved is None or not (has_work(state, part, phase) or part.runs[phase].replies):
        return state.with_part(replace(part, done=part.done | {phase})), []
    rest = promised(state, part) - part.done - {phase, Phase.FREE}
    return _tell(state, part, milestone(state, part, phase, moved, at, complete=not rest))


def _finish(state: State, part: Part, at: datetime) -> tuple[State, list[Effect]]:
    """End a part of which nothing is left, without the event that was to say so (its last workers are gone)."""
    if not part.moved:
        return state.with_part(part.ended(Outcome.DONE)), []
    return _tell(state, part, milestone(state, part, Phase.RELEASE, "released", at, complete=True))


def _tell(state: State, part: Part, event: StateMoved) -> tuple[State, list[Effect]]:
    return _moved(state.with_part(part), event), [Append(event)]


def _new_failure(state: State, part: Part) -> Part | None:
    """Return the part with a failure that no answer told of: time-outs, lost nodes, waits in vain."""
    failing = {failure.phase for failure in part.failures}
    for phase, run in part.runs.items():
        # Those beside the silent ones have the same deadline: all who are silent are named.
        if run.silent and not run.outstanding and phase not in failing:
            return _failing(part, phase, TIMEOUT, "no answer in time", run.silent)
    for phase in (Phase.CONFIGURE_INTERRUPTED, Phase.CONFIGURE_TARGET):
        stage = stage_of(part, phase)
        if stage is None or phase in part.done or phase in failing or not has_work(state, part, phase):
            continue
        if not state.lost.isdisjoint(m.node for m in stage.members):
            gone = tuple(w for w in members(stage) if node_of(w) in state.lost)
            nodes = ", ".join(sorted({node_of(w) for w in gone}))
            return _failing(part, phase, NODE_LOST, f"members on {nodes}", gone)
    if part.change.prepare and part.task not in state.specs and not part.failures:
        return _failing(part, Phase.PREPARE, "unknown-task", "its specification is not in the log", ())
    if TimerName.WAIT in part.fired and not part.failures:
        waiting = occupied(state, part, unready(part))
        if waiting:
            return _failing(part, Phase.PREPARE, "occupied", f"never released: {', '.join(waiting)}", ())
    return None


def _broken(part: Part) -> bool:
    """Whether a failure concerns more than what runs beside the interrupted stage.

    A process that does not start, a failed one that does not end, a node of the target that is lost: these leave the
    survivors alone. They finish their step first, so that it is known how they stand.
    """
    beside = (Phase.FREE, Phase.PREPARE, Phase.CONFIGURE_TARGET)
    return part.change.interrupted is None or any(failure.phase not in beside for failure in part.failures)


def _fail(state: State, part: Part, at: datetime) -> tuple[State, list[Effect]]:
    """Report the failure; first wait a moment for the plan that answers it, if the detector knows of it."""
    if all(failure.known for failure in part.failures) and TimerName.GRACE not in part.fired:
        if TimerName.GRACE in part.timers:
            return state, []
        return _start_timer(state, part, TimerName.GRACE, state.limits.grace_s)
    return _tell(state, part, failed(state, part, at))


def _start_timer(state: State, part: Part, name: TimerName, after_s: float) -> tuple[State, list[Effect]]:
    part = replace(part, timers=part.timers | {name})
    return state.with_part(part), [Timer(part.plan, part.task, name, after_s)]
