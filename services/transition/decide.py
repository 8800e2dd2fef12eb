"""The decisions of the transition service: ``decide`` returns the effects that follow from an input.

No clock, no randomness, no I/O. The state-moved events that are decided are folded at once (``evolve.fold_moved``).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from services.transition import phases
from services.transition.evolve import fold_moved, hear
from services.transition.moved_events import moved_phase, part_failed, phase_ended
from services.transition.phase_commands import commands, prepare_commands
from services.transition.state import (
    Cancel,
    Effect,
    Failure,
    Input,
    Outcome,
    Part,
    Phase,
    PhaseRun,
    Replied,
    State,
    Timer,
    TimerFired,
    TimerName,
    node_of,
)
from shared.events.codes import FailureCode
from shared.events.union import StateMoved
from shared.service.core import Append

_BESIDE_INTERRUPTED_STAGE = frozenset({Phase.FREE, Phase.PREPARE, Phase.CONFIGURE_TARGET})
"""Phases whose failure leaves the survivors alone: a process that does not start, a failed one that does not end, a
lost node of the target. The survivors finish their step first, so that it is known which step they have."""


_PHASES = tuple(Phase)
"""The phases in their order, since the class itself is slow to go through: each of thousands of replies does."""

_ALL = frozenset(_PHASES)


def decide(state: State, item: Input, at: datetime) -> tuple[State, list[Effect]]:
    """Return the state after an input and all decisions that are due, and their effects.

    ``at``: the time of the input. Effects are to be performed in order: an ``Append`` is in the log before the commands
    behind it are sent, so a restarted service never repeats a command that later ones have overtaken.
    """
    if isinstance(item, Replied | TimerFired):
        state = hear(state, item)
    effects: list[Effect] = []
    progress = True
    while progress:
        progress = False
        # Again while anything changes: another task's part may wait for what one part has released.
        for task in sorted(state.tasks):
            after, new = _advance(state, task, at)
            progress = progress or after is not state
            state = after
            effects += new
    if state.cancelled:
        effects += [Cancel(command_id) for command_id in state.cancelled]
        state = replace(state, cancelled=())
    return state, effects


def _advance(state: State, task: str, at: datetime) -> tuple[State, list[Effect]]:
    """Take one step of a task's part; return the same state if there is none to take."""
    part = state.task(task).part
    if part is None or not part.active:
        return state, []
    failure = _new_failure(state, part)
    if failure is not None:
        return state.with_part(part.with_failure(failure)), []
    allowed = _ALL
    if part.failures:
        allowed = frozenset() if _disturbs_survivors(part) else phases.INTERRUPTED_STAGE
        if allowed <= part.done:
            return _fail(state, part, at)
    for phase in _PHASES:
        if phase in part.done or phase not in allowed or not phases.AFTER[phase] <= part.done:
            continue
        after, effects = _advance_phase(state, part, phase, at)
        if after is not state:
            return after, effects
    if not part.failures and part.done >= _ALL:
        return _complete(state, part, at)
    return state, []


# ---- phases


def _advance_phase(state: State, part: Part, phase: Phase, at: datetime) -> tuple[State, list[Effect]]:
    """Begin a phase, continue it, or end it."""
    run = part.runs.get(phase)
    if run is None:
        return _begin(state, part, phase, at)
    prepares = phase is Phase.PREPARE and phases.has_work(state, part, phase)
    if prepares:
        after, effects = _continue_prepare(state, part, run, at)
        if after is not state:
            return after, effects
    # The cheap question comes first: each reply of a node leads here.
    if run.outstanding or (prepares and state.alive(phases.unready(part))):
        return state, []
    if phase is Phase.RELEASE and phases.awaits_save(part):
        if TimerName.SAVE in part.timers:
            return state, []
        # If all have saved, the event comes once the detector is there. Otherwise rank 0, which reports it, may be
        # lost.
        after_s = state.limits.resume_s if phases.have_saved(part) else state.limits.grace_s
        return _start_timer(state, part, TimerName.SAVE, after_s)
    run.ended_at = at
    return _end(state, part, phase, at)


def _begin(state: State, part: Part, phase: Phase, at: datetime) -> tuple[State, list[Effect]]:
    if phase is Phase.DRAIN and phases.has_work(state, part, phase):
        waits = phases.is_held_back(part, at) and bool(state.alive(phases.unready(part)))
        if waits or not phases.may_drain(state, part):
            return state, []
    if phase in phases.STORES and phases.has_work(state, part, phase) and phases.holds_stages_back(part, at):
        return _wait_until_due(state, part, at)
    run = PhaseRun(started_at=at)
    run.send(commands(state, part, phase))
    if phase is Phase.RELEASE:
        state = state.with_leaving(part.task, add=(w for s in run.outstanding.values() for w in s.workers))
    return state.with_part(part.with_run(phase, run)), list(run.outstanding.values())


def _continue_prepare(state: State, part: Part, run: PhaseRun, at: datetime) -> tuple[State, list[Effect]]:
    """Prepare the workers that have become free; start a timer if the part now waits for workers only."""
    if phases.is_held_back(part, at):
        return _wait_until_due(state, part, at)
    new = prepare_commands(state, part)
    if new:
        run.send(new)
        starting = {w for send in new for w in send.workers}
        occupied = state.task(part.task).occupied | starting
        state = state.with_leaving(part.task, drop=starting)
        return state.with_occupied(part.task, occupied), list(new)
    if TimerName.WAIT not in part.timers and not phases.is_preparing(part) and state.alive(phases.unready(part)):
        return _start_timer(state, part, TimerName.WAIT, state.limits.wait_s)
    return state, []


def _wait_until_due(state: State, part: Part, at: datetime) -> tuple[State, list[Effect]]:
    """Start the timer of a part that is held back, once: of what is left, so a restarted service goes on waiting."""
    if TimerName.BACK_OFF in part.timers or part.change.not_before is None:
        return state, []
    return _start_timer(state, part, TimerName.BACK_OFF, (part.change.not_before - at).total_seconds())


def _end(state: State, part: Part, phase: Phase, at: datetime) -> tuple[State, list[Effect]]:
    moved = moved_phase(part, phase)
    if moved is None or not (phases.has_work(state, part, phase) or part.runs[phase].replies):
        return state.with_part(replace(part, done=part.done | {phase})), []
    left = phases.phases_with_work(state, part) - part.done - {phase, Phase.FREE}
    return _record(state, part, phase_ended(state, part, phase, moved, at, complete=not left))


def _complete(state: State, part: Part, at: datetime) -> tuple[State, list[Effect]]:
    """Complete a part whose phases are all done: the plan has no work, or the last workers to release were lost."""
    if not part.moved:
        return state.with_part(part.ended(Outcome.DONE)), []
    return _record(state, part, phase_ended(state, part, Phase.RELEASE, "released", at, complete=True))


def _record(state: State, part: Part, event: StateMoved) -> tuple[State, list[Effect]]:
    """Return the state with the event folded, and the effect that appends the event."""
    return fold_moved(state.with_part(part), event), [Append([event])]


# ---- failures


def _new_failure(state: State, part: Part) -> Failure | None:
    """Return a failure of the part that no reply reports: a time-out, a lost node, or a wait in vain."""
    failing = {failure.phase for failure in part.failures}
    for phase, run in part.runs.items():
        # Commands of one phase have one deadline: wait for all of them, so that all silent workers are named.
        if run.silent and not run.outstanding and phase not in failing:
            return Failure(phase, FailureCode.TIMEOUT, "no answer in time", run.silent)
    for phase in (Phase.CONFIGURE_INTERRUPTED, Phase.CONFIGURE_TARGET):
        if phase not in failing and (lost := _lost_members(state, part, phase)):
            nodes = ", ".join(sorted({node_of(w) for w in lost}))
            return Failure(phase, FailureCode.NODE_LOST, f"members on {nodes}", lost)
    if part.failures:
        return None
    if part.change.prepare and state.task(part.task).spec is None:
        return Failure(Phase.PREPARE, FailureCode.UNKNOWN_TASK, "its specification is not in the log", ())
    if TimerName.WAIT in part.fired and (waiting := phases.not_yet_free(state, part, phases.unready(part))):
        return Failure(Phase.PREPARE, FailureCode.OCCUPIED, f"never released: {', '.join(waiting)}", ())
    return None


def _lost_members(state: State, part: Part, phase: Phase) -> tuple[str, ...]:
    """Return the members, on lost nodes, of a stage that is still to be configured."""
    stage = phases.stage_of(part, phase)
    if stage is None or phase in part.done or not phases.has_work(state, part, phase):
        return ()
    if state.lost.isdisjoint(stage.nodes):
        return ()
    return tuple(w for w in phases.members(stage) if node_of(w) in state.lost)


def _disturbs_survivors(part: Part) -> bool:
    """Whether a failure concerns the interrupted stage, or there is no such stage."""
    if part.change.interrupted is None:
        return True
    return any(failure.phase not in _BESIDE_INTERRUPTED_STAGE for failure in part.failures)


def _fail(state: State, part: Part, at: datetime) -> tuple[State, list[Effect]]:
    """Record the failure. If the detector learns of the cause by itself, first wait for the plan that answers it."""
    if all(failure.signalled for failure in part.failures) and TimerName.GRACE not in part.fired:
        if TimerName.GRACE in part.timers:
            return state, []
        return _start_timer(state, part, TimerName.GRACE, state.limits.grace_s)
    return _record(state, part, part_failed(state, part, at))


def _start_timer(state: State, part: Part, name: TimerName, after_s: float) -> tuple[State, list[Effect]]:
    part = replace(part, timers=part.timers | {name})
    return state.with_part(part), [Timer(part.plan, part.task, name, after_s)]
