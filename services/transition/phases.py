"""The phases of a part: their order, and the workers that each of them concerns.

The order is a graph, not a list: failed workers are released and processes are started beside the phases of the
survivors, which do not wait for them. ``phase_commands`` has the commands of each phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from services.transition.state import Part, Phase, State, TimerName, node_of
from shared.events.plans import Stage, TaskChange

AFTER: dict[Phase, frozenset[Phase]] = {
    Phase.HOLD: frozenset(),
    Phase.FREE: frozenset(),
    Phase.PREPARE: frozenset({Phase.FREE}),
    Phase.STORE_INTERRUPTED: frozenset(),
    Phase.CONFIGURE_INTERRUPTED: frozenset({Phase.HOLD, Phase.STORE_INTERRUPTED}),
    Phase.DRAIN: frozenset({Phase.CONFIGURE_INTERRUPTED, Phase.FREE}),
    Phase.STOP: frozenset({Phase.CONFIGURE_INTERRUPTED, Phase.FREE}),
    Phase.RELEASE: frozenset({Phase.DRAIN, Phase.STOP}),
    Phase.STORE_TARGET: frozenset({Phase.CONFIGURE_INTERRUPTED, Phase.FREE, Phase.PREPARE}),
    Phase.CONFIGURE_TARGET: frozenset({Phase.STORE_TARGET, Phase.RELEASE}),
}
"""Phase -> the phases that must be done before it starts. ``DRAIN`` has a further condition: ``may_drain``.

Stores open beside holding and draining, so that no rank waits for the start of a store. The target's store opens after
``PREPARE``: an agent closes the stores of a task that has no process on its node."""

STORES = frozenset({Phase.STORE_INTERRUPTED, Phase.STORE_TARGET})
"""The phases with which a stage begins."""

INTERRUPTED_STAGE = frozenset({Phase.HOLD, Phase.STORE_INTERRUPTED, Phase.CONFIGURE_INTERRUPTED})
"""The phases in which the survivors finish the broken step. Failures of other phases do not disturb them."""

ENDINGS = frozenset({"stop", "pause", "end"})
"""Actions of a ``TaskChange`` after which the task has no process."""


def before(phase: Phase) -> frozenset[Phase]:
    """Return all phases that are done when ``phase`` begins."""
    found: set[Phase] = set()
    open_ = list(AFTER[phase])
    while open_:
        nearest = open_.pop()
        if nearest not in found:
            found.add(nearest)
            open_.extend(AFTER[nearest])
    return frozenset(found)


def stage_of(part: Part, phase: Phase) -> Stage | None:
    """Return the stage that the phase belongs to; None for a phase that belongs to no stage."""
    if phase in (Phase.STORE_INTERRUPTED, Phase.CONFIGURE_INTERRUPTED):
        return part.change.interrupted
    if phase in (Phase.STORE_TARGET, Phase.CONFIGURE_TARGET):
        return part.change.target
    return None


def generation_of(part: Part, phase: Phase) -> int:
    """Return the generation of the phase's commands.

    An agent refuses commands that are older than the newest it has seen. So phases that run beside the interrupted
    stage (starting processes, ending failed ones) carry the generation of that stage; the drain brings the target's.
    """
    stages = part.change.stages
    if not stages:
        return part.generation
    late = phase in (Phase.DRAIN, Phase.RELEASE, Phase.STORE_TARGET, Phase.CONFIGURE_TARGET)
    if phase is Phase.PREPARE:
        late = any(p in part.runs or p in part.done for p in (Phase.DRAIN, Phase.RELEASE))
    return stages[-1 if late else 0].generation


# ---- the workers of each phase


def members(stage: Stage | None) -> list[str]:
    """Return the stage's workers in rank order; none without a stage."""
    return [m.worker for m in sorted(stage.members, key=lambda m: m.rank)] if stage else []


def kept(part: Part) -> frozenset[str]:
    """Return the workers that have a process of the task when the part is done."""
    change = part.change
    if change.action in ENDINGS:
        return frozenset()
    if change.target is not None:
        return frozenset(members(change.target))
    return frozenset(members(change.interrupted)) | frozenset(change.survivors)


def to_hold(part: Part) -> list[str]:
    """Return the survivors that must leave the broken step, sorted."""
    change = part.change
    if not (change.hold or change.interrupted):
        return []
    return sorted({*change.survivors, *members(change.interrupted)})


def to_free(part: Part) -> list[str]:
    """Return the failed workers, sorted. They are released first."""
    return sorted(set(part.change.failed))


def to_drain(part: Part) -> list[str]:
    """Return the workers that train and must come to a step boundary, sorted."""
    return sorted(set(_draining(part.change)))


def to_stop(part: Part) -> list[str]:
    """Return the workers that write a checkpoint and exit, sorted."""
    change = part.change
    if change.action not in ("stop", "pause"):
        return []
    return sorted({*change.survivors, *members(change.interrupted)} - {*change.failed})


def to_release(state: State, part: Part) -> list[str]:
    """Return the workers whose processes end before the target stage, sorted.

    Beside the workers that the plan releases, these include workers with a process of the task that no stage needs, for
    example one that a superseded plan has started. Such a process would otherwise occupy its worker for ever.
    """
    change = part.change
    occupied = state.task(part.task).occupied
    if change.action in ENDINGS:
        return sorted({*occupied, *change.survivors, *change.failed, *change.release})
    return sorted({*change.release} | (occupied - kept(part) - {*change.failed, *change.prepare}))


def _draining(change: TaskChange) -> Iterator[str]:
    """Yield the workers that train and must come to a step boundary: none if they are held."""
    if change.action != "move":
        return
    if change.interrupted is not None:
        yield from (member.worker for member in change.interrupted.members if change.target is not None)
    elif not change.hold:
        failed = frozenset(change.failed)
        yield from (worker for worker in change.survivors if worker not in failed)


# ---- preparing


def unready(part: Part) -> frozenset[str]:
    """Return the workers of ``change.prepare`` whose process is not known to be up."""
    return frozenset(part.change.prepare) - part.ready


def is_preparing(part: Part) -> bool:
    """Whether a ``Prepare`` is unanswered."""
    run = part.runs.get(Phase.PREPARE)
    return run is not None and bool(run.outstanding)


def preparing(part: Part) -> frozenset[str]:
    """Return the workers whose ``Prepare`` is unanswered."""
    run = part.runs.get(Phase.PREPARE)
    return frozenset().union(*(send.workers for send in run.outstanding.values())) if run else frozenset()


def has_asked_all(part: Part) -> bool:
    """Whether each worker of ``change.prepare`` is ready, or its ``Prepare`` is unanswered.

    No worker is both, so it is enough to count: each of thousands of replies leads here.
    """
    run = part.runs.get(Phase.PREPARE)
    return len(part.ready) + (run.asked if run else 0) == len(part.change.prepare)


def is_held_back(part: Part, at: datetime) -> bool:
    """Return whether the part has to wait before it starts processes or retries, since the same failure came again."""
    until = part.change.not_before
    return until is not None and at < until and TimerName.BACK_OFF not in part.fired


def holds_stages_back(part: Part, at: datetime) -> bool:
    """Return whether no stage may begin yet. The survivors of a part that starts processes go on meanwhile."""
    return not part.change.prepare and is_held_back(part, at)


def not_yet_free(state: State, part: Part, workers: Iterable[str]) -> list[str]:
    """Return those of the workers, sorted, on which a process must end before one of this task can start there."""
    own = frozenset() if Phase.RELEASE in part.done else frozenset(part.change.release)
    return sorted(w for w in workers if w in own or state.occupied_by_others(part.task, w))


def may_drain(state: State, part: Part) -> bool:
    """Whether the task's training may be interrupted for the drain.

    All processes that could be started must be up. A part that releases no worker also waits for the processes on
    workers that other tasks have to release: until then its ranks would only idle. No other task waits for such a part,
    so no cycle can form.
    """
    if is_preparing(part):
        return False
    return bool(to_release(state, part)) or not state.alive(unready(part))


def awaits_save(part: Part) -> bool:
    """Whether a paused task's workers have saved its state, and the log does not yet say where.

    The end of the pause has to come later: services that see the end first would take the ``task.stopped`` behind it
    for the end of the task, and the next plan would not know the checkpoint.
    """
    run = part.runs.get(Phase.STOP)
    saves = part.change.action == "pause" and run is not None and bool(run.replies)
    return saves and not part.saved and TimerName.SAVE not in part.fired


def have_saved(part: Part) -> bool:
    """Return whether every node of the workers that were to save the task's state has answered that they have."""
    run = part.runs.get(Phase.STOP)
    return run is not None and {reply.node for reply in run.replies} >= {node_of(worker) for worker in to_stop(part)}


# ---- whether a phase has work


def has_work(state: State, part: Part, phase: Phase) -> bool:
    """Whether the part has something to do in the phase.

    ``decide`` asks this after every reply of an agent. For ``PREPARE``, ``DRAIN`` and the stages it must therefore not
    list or sort workers: with thousands of workers that would dominate the time spent on a reply.
    """
    change = part.change
    moves, ends = change.action == "move", change.action in ENDINGS
    if change.action == "end":
        # The task is over: only the release of its workers is left to do.
        return phase is Phase.RELEASE
    match phase:
        case Phase.HOLD:
            return bool(to_hold(part))
        case Phase.FREE:
            return bool(change.failed)
        case Phase.PREPARE:
            return bool(change.prepare) and not ends
        case Phase.STORE_INTERRUPTED | Phase.CONFIGURE_INTERRUPTED:
            return change.interrupted is not None
        case Phase.DRAIN:
            return any(True for _ in _draining(change))
        case Phase.STOP:
            return bool(to_stop(part))
        case Phase.RELEASE:
            return ends or bool(to_release(state, part))
        case Phase.STORE_TARGET | Phase.CONFIGURE_TARGET:
            return change.target is not None and moves


def phases_with_work(state: State, part: Part) -> frozenset[Phase]:
    """Return the phases in which the part has something to do."""
    return frozenset(phase for phase in Phase if has_work(state, part, phase))
