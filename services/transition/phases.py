"""The phases of a part: which wait for which, and what each asks of the agents.

The order of the phases is a graph, not a list: a failed worker is ended and processes are started beside what the
survivors do, and they do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from services.transition.state import Part, Phase, Send, State, node_of
from shared.commands import (
    Command,
    ConfigureTask,
    DrainTask,
    HoldTask,
    OpenStore,
    Prepare,
    ReleaseTask,
    StopTask,
)
from shared.events import derived_id
from shared.plans import Stage, TaskChange

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
"""A phase starts when these are done. ``DRAIN`` has a further condition: ``may_drain``.

Stores open beside holding and draining, so that no rank stands still for the start of one. The target's waits until
its node has a process of the task that stays: an agent closes the stores of a task that has left the node.
"""

INTERRUPTED = frozenset({Phase.HOLD, Phase.STORE_INTERRUPTED, Phase.CONFIGURE_INTERRUPTED})
"""What the survivors do to finish the step that broke; a failure beside it does not disturb it."""

ENDINGS = frozenset({"stop", "pause", "end"})
"""Actions after which the task has no process left."""


def before(phase: Phase) -> frozenset[Phase]:
    """Return all phases that are done when ``phase`` has begun."""
    found: set[Phase] = set()
    open_ = list(AFTER[phase])
    while open_:
        nearest = open_.pop()
        if nearest not in found:
            found.add(nearest)
            open_.extend(AFTER[nearest])
    return frozenset(found)


def members(stage: Stage | None) -> list[str]:
    """Return the stage's workers in rank order."""
    return [m.worker for m in sorted(stage.members, key=lambda m: m.rank)] if stage else []


def kept(part: Part) -> frozenset[str]:
    """Return the workers that carry the task when the part is done."""
    change = part.change
    if change.action in ENDINGS:
        return frozenset()
    if change.target is not None:
        return frozenset(members(change.target))
    return frozenset(members(change.interrupted)) | frozenset(change.survivors)


def to_hold(part: Part) -> list[str]:
    """Return the survivors that must leave the broken step."""
    change = part.change
    if not (change.hold or change.interrupted):
        return []
    return sorted({*change.survivors, *members(change.interrupted)})


def to_free(part: Part) -> list[str]:
    """Return the failed workers, which are released first of all."""
    return sorted(set(part.change.failed))


def _draining(change: TaskChange) -> Iterator[str]:
    """Yield the workers that train and must come to a step boundary: none if they are held already."""
    if change.action != "move":
        return
    if change.interrupted is not None:
        yield from (member.worker for member in change.interrupted.members if change.target is not None)
    elif not change.hold:
        failed = frozenset(change.failed)
        yield from (worker for worker in change.survivors if worker not in failed)


def to_drain(part: Part) -> list[str]:
    """Return the workers that train and must come to a step boundary, sorted."""
    return sorted(set(_draining(part.change)))


def to_stop(part: Part) -> list[str]:
    """Return the workers that write a checkpoint and exit."""
    change = part.change
    if change.action not in ("stop", "pause"):
        return []
    return sorted({*change.survivors, *members(change.interrupted)} - {*change.failed})


def to_release(state: State, part: Part) -> list[str]:
    """Return the workers whose processes end before the target.

    Beside those the plan names: processes of the task that no stage needs, such as one that a superseded plan had
    started. Left alone they would occupy their slot for good.
    """
    change = part.change
    occupied = state.occupied.get(part.task, frozenset())
    if change.action in ENDINGS:
        return sorted({*occupied, *change.survivors, *change.failed, *change.release})
    return sorted({*change.release} | (occupied - kept(part) - {*change.failed, *change.prepare}))


def unready(part: Part) -> frozenset[str]:
    """Return the workers of ``prepare`` whose process is not known to be up."""
    return frozenset(part.change.prepare) - part.ready


def asking(part: Part) -> bool:
    """Whether a ``Prepare`` is unanswered."""
    run = part.runs.get(Phase.PREPARE)
    return run is not None and bool(run.outstanding)


def preparing(part: Part) -> frozenset[str]:
    """Return the workers whose ``Prepare`` is unanswered."""
    run = part.runs.get(Phase.PREPARE)
    return frozenset(w for send in run.outstanding.values() for w in send.workers) if run else frozenset()


def occupied(state: State, part: Part, workers: Iterable[str]) -> list[str]:
    """Return those workers, sorted, on which a process must end before one of this task can start there."""
    own = frozenset() if Phase.RELEASE in part.done else frozenset(part.change.release)
    return sorted(w for w in workers if w in own or state.held_by_others(part.task, w))


def may_drain(state: State, part: Part) -> bool:
    """Whether training may be brought to a halt.

    Processes that could be started are up. A part that releases nothing also trains on until those are up that
    wait for another task: nobody waits for it, so no cycle can form, and it would only idle.
    """
    if asking(part):
        return False
    return bool(to_release(state, part)) or all(node_of(w) in state.lost for w in unready(part))


def has_work(state: State, part: Part, phase: Phase) -> bool:
    """Whether this part has something to do in the phase.

    Of ``PREPARE``, ``DRAIN`` and the stages this is asked with every answer of an agent, so it lists and sorts nobody
    for them: with thousands of workers that takes longer than anything else that is done about the answer.
    """
    change = part.change
    moves, ends = change.action == "move", change.action in ENDINGS
    if change.action == "end":
        # The task is over: one release of everything, nothing worth holding or finishing.
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


def promised(state: State, part: Part) -> frozenset[Phase]:
    """Return the phases that this part has something to do in."""
    return frozenset(phase for phase in Phase if has_work(state, part, phase))


def stage_of(part: Part, phase: Phase) -> Stage | None:
    """Return the stage the phase belongs to."""
    interrupted, target = part.change.interrupted, part.change.target
    if phase in (Phase.STORE_INTERRUPTED, Phase.CONFIGURE_INTERRUPTED):
        return interrupted
    if phase in (Phase.STORE_TARGET, Phase.CONFIGURE_TARGET):
        return target
    return None


def generation_of(part: Part, phase: Phase) -> int:
    """Return the generation that the phase's commands carry.

    An agent refuses what is older than the newest it has seen, so what runs beside the interrupted stage (starting
    processes, ending failed ones) carries that stage's generation; the target's comes with the drain.
    """
    stages = part.change.stages
    if not stages:
        return part.generation
    late = phase in (Phase.DRAIN, Phase.RELEASE, Phase.STORE_TARGET, Phase.CONFIGURE_TARGET)
    if phase is Phase.PREPARE:
        late = any(p in part.runs or p in part.done for p in (Phase.DRAIN, Phase.RELEASE))
    return stages[-1 if late else 0].generation


def sends(state: State, part: Part, phase: Phase) -> list[Send]:
    """Return the commands a phase begins with, one for each node that has something to do and is not lost.

    ``PREPARE`` begins with none: its workers are asked as they become free (``prepare_sends``).
    """
    build = _BUILDERS.get(phase)
    return build(state, part, phase) if build and has_work(state, part, phase) else []


def prepare_sends(state: State, part: Part) -> list[Send]:
    """Return ``Prepare`` for each worker that is free now and has not been asked."""
    spec = state.specs.get(part.task)
    waiting = unready(part) - preparing(part)
    if spec is None or not waiting:
        return []
    waiting -= frozenset(occupied(state, part, waiting))
    return _per_node(
        state, part, Phase.PREPARE, sorted(waiting), lambda base, mine: Prepare(**base, workers=mine, spec=spec)
    )


Build = Callable[[dict[str, Any], list[str]], Command]
"""Makes a command from the fields all commands have and the node's workers."""


def _per_node(
    state: State, part: Part, phase: Phase, workers: Iterable[str], build: Build, salt: str = ""
) -> list[Send]:
    """Return one command for each node. Its id is the same whenever the same thing is asked again."""
    waits_for_step = phase in (Phase.DRAIN, Phase.STOP, Phase.CONFIGURE_INTERRUPTED, Phase.CONFIGURE_TARGET)
    nodes: dict[str, list[str]] = {}
    for worker in workers:
        nodes.setdefault(node_of(worker), []).append(worker)
    found = []
    for node, mine in sorted(nodes.items()):
        if node in state.lost:
            continue
        name = f"{part.task}/{phase}/{node}/{','.join(mine)}/{salt}"
        base = {
            "command_id": derived_id(part.plan, "transition-command", name),
            "plan": part.plan,
            "task": part.task,
            "generation": generation_of(part, phase),
        }
        timeout_s = state.limits.resume_s if waits_for_step else state.limits.command_s
        found.append(Send(node, build(base, mine), timeout_s, tuple(mine)))
    return found


def _hold(state: State, part: Part, phase: Phase) -> list[Send]:
    return _per_node(state, part, phase, to_hold(part), lambda base, mine: HoldTask(**base, workers=mine))


def _free(state: State, part: Part, phase: Phase) -> list[Send]:
    return _per_node(state, part, phase, to_free(part), lambda base, mine: ReleaseTask(**base, workers=mine))


def _drain(state: State, part: Part, phase: Phase) -> list[Send]:
    return _per_node(state, part, phase, to_drain(part), lambda base, mine: DrainTask(**base, workers=mine))


def _stop(state: State, part: Part, phase: Phase) -> list[Send]:
    return _per_node(state, part, phase, to_stop(part), lambda base, mine: StopTask(**base, workers=mine))


def _release(state: State, part: Part, phase: Phase) -> list[Send]:
    staying = {node_of(w) for w in kept(part)}

    def build(base: dict[str, Any], mine: list[str]) -> Command:
        # A node that the task leaves ends the task's store, too.
        return ReleaseTask(**base, workers=mine, all_workers=node_of(mine[0]) not in staying)

    return _per_node(state, part, phase, to_release(state, part), build)


def _store(state: State, part: Part, phase: Phase) -> list[Send]:
    """The store runs beside the stage's lowest rank whose node lives."""
    alive = [w for w in members(stage_of(part, phase)) if node_of(w) not in state.lost]
    mine = [w for w in alive if node_of(w) == node_of(alive[0])]
    return _per_node(state, part, phase, mine, lambda base, _: OpenStore(**base))


def _configure(state: State, part: Part, phase: Phase) -> list[Send]:
    run = part.runs.get(Phase.STORE_INTERRUPTED if phase is Phase.CONFIGURE_INTERRUPTED else Phase.STORE_TARGET)
    stage = stage_of(part, phase)
    if run is None or not run.replies or stage is None:
        return []
    store = run.replies[-1]

    def build(base: dict[str, Any], _: list[str]) -> Command:
        fault_step = state.steps.get(part.task, 0)
        return ConfigureTask(**base, stage=stage, store_host=store.host, store_port=store.port, fault_step=fault_step)

    return _per_node(state, part, phase, members(stage), build, salt=f"{store.host}:{store.port}")


_BUILDERS: dict[Phase, Callable[[State, Part, Phase], list[Send]]] = {
    Phase.HOLD: _hold,
    Phase.FREE: _free,
    Phase.DRAIN: _drain,
    Phase.STOP: _stop,
    Phase.RELEASE: _release,
    Phase.STORE_INTERRUPTED: _store,
    Phase.STORE_TARGET: _store,
    Phase.CONFIGURE_INTERRUPTED: _configure,
    Phase.CONFIGURE_TARGET: _configure,
}
