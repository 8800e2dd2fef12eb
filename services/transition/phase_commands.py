"""The commands of each phase of a part, as effects of the core.

``commands`` returns the commands with which a phase begins; ``prepare_commands`` those for workers that become free
later. ``phases`` says which workers a phase concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from services.transition import phases
from services.transition.lost_peers import LostPeers
from services.transition.state import Part, Phase, Send, State, node_of
from shared.events.union import derived_id
from shared.messages.commands import (
    Command,
    ConfigureTask,
    DrainTask,
    HoldTask,
    OpenStore,
    Prepare,
    ReleaseTask,
    StopTask,
)

WAITS_FOR_STEP = frozenset({Phase.HOLD, Phase.DRAIN, Phase.STOP, Phase.CONFIGURE_INTERRUPTED, Phase.CONFIGURE_TARGET})
"""Phases whose commands wait for a training step, so ``TransitionLimits.resume_s`` is their time-out. A rank that is
held leaves its step at the end of a micro-batch, which may be the first one of its process."""

Build = Callable[[dict[str, Any], list[str]], Command]
"""Makes a command from the fields that all commands have and the node's workers."""


def commands(state: State, part: Part, phase: Phase) -> list[Send]:
    """Return the commands with which a phase begins, one for each concerned node that is not lost.

    ``PREPARE`` begins without commands: ``prepare_commands`` has them as workers become free.
    """
    build = _BUILDERS.get(phase)
    return build(state, part, phase) if build and phases.has_work(state, part, phase) else []


def prepare_commands(state: State, part: Part) -> list[Send]:
    """Return ``Prepare`` for each worker that is free now and whose ``Prepare`` was not sent yet."""
    spec = state.task(part.task).spec
    if spec is None or phases.has_asked_all(part):
        return []
    waiting = phases.unready(part) - phases.preparing(part)
    waiting -= frozenset(phases.not_yet_free(state, part, waiting))
    return _per_node(
        state, part, Phase.PREPARE, sorted(waiting), lambda base, mine: Prepare(**base, workers=mine, spec=spec)
    )


def _per_node(
    state: State, part: Part, phase: Phase, workers: Iterable[str], build: Build, salt: str = ""
) -> list[Send]:
    """Return one command for each node of the workers.

    A command's id depends on plan, task, phase, node, workers and ``salt`` only, so a restarted service sends the same
    id.
    """
    nodes: dict[str, list[str]] = {}
    for worker in workers:
        nodes.setdefault(node_of(worker), []).append(worker)
    timeout_s = state.limits.resume_s if phase in WAITS_FOR_STEP else state.limits.command_s
    found, generation = [], phases.generation_of(part, phase)
    for node, mine in sorted(nodes.items()):
        if node in state.lost:
            continue
        name = f"{part.task}/{phase}/{node}/{','.join(mine)}/{salt}"
        base = _about(part, derived_id(part.plan, "transition-command", name), generation)
        found.append(Send(node, build(base, mine), timeout_s, tuple(mine)))
    return found


def _about(part: Part, command_id: str, generation: int) -> dict[str, Any]:
    """Return the fields that all commands have."""
    return {"command_id": command_id, "plan": part.plan, "task": part.task, "generation": generation}


def _hold(state: State, part: Part, phase: Phase) -> list[Send]:
    # One command checks who is lost, not each, since each names some of the same workers.
    lost = phases.to_free(part)
    alike = HoldTask(**_about(part, part.plan, phases.generation_of(part, phase)), workers=[], lost=lost)
    peers = LostPeers(lost, state.task(part.task).stages)

    def build(base: dict[str, Any], mine: list[str]) -> Command:
        return alike.model_copy(update={**base, "workers": mine, "lost": peers.of(mine)})

    return _per_node(state, part, phase, phases.to_hold(part), build)


def _free(state: State, part: Part, phase: Phase) -> list[Send]:
    return _per_node(state, part, phase, phases.to_free(part), lambda base, mine: ReleaseTask(**base, workers=mine))


def _drain(state: State, part: Part, phase: Phase) -> list[Send]:
    return _per_node(state, part, phase, phases.to_drain(part), lambda base, mine: DrainTask(**base, workers=mine))


def _stop(state: State, part: Part, phase: Phase) -> list[Send]:
    # A pause makes room for other tasks in any case, so it cannot be refused.
    lose = state.task(part.task).may_lose or part.change.action == "pause"
    return _per_node(
        state, part, phase, phases.to_stop(part), lambda base, mine: StopTask(**base, workers=mine, lose_steps=lose)
    )


def _release(state: State, part: Part, phase: Phase) -> list[Send]:
    staying = {node_of(w) for w in phases.kept(part)}
    # A task that is paused, has failed, or has ended without a process that could save its state, may go on: the
    # detector knows when its copies are not needed any more. A task that has finished or was stopped has what it needs.
    action = part.change.action
    keep = action == "pause" or (action == "end" and state.task(part.task).unfinished)

    def build(base: dict[str, Any], mine: list[str]) -> Command:
        return ReleaseTask(**base, workers=mine, all_workers=node_of(mine[0]) not in staying, keep_copies=keep)

    return _per_node(state, part, phase, phases.to_release(state, part), build)


def _store(state: State, part: Part, phase: Phase) -> list[Send]:
    """Return ``OpenStore`` for the node of the stage's lowest rank that is alive."""
    alive = [w for w in phases.members(phases.stage_of(part, phase)) if node_of(w) not in state.lost]
    mine = [w for w in alive if node_of(w) == node_of(alive[0])]
    return _per_node(state, part, phase, mine, lambda base, _: OpenStore(**base))


def _configure(state: State, part: Part, phase: Phase) -> list[Send]:
    run = part.runs.get(Phase.STORE_INTERRUPTED if phase is Phase.CONFIGURE_INTERRUPTED else Phase.STORE_TARGET)
    stage = phases.stage_of(part, phase)
    if run is None or not run.replies or stage is None:
        return []
    store, task = run.replies[-1], state.task(part.task)
    # One node checks, not each, since the check names all members.
    alike = ConfigureTask(
        **_about(part, part.plan, stage.generation),
        stage=stage,
        store_host=store.host,
        store_port=store.port,
        fault_step=task.step,
        resumes=task.resumes,
        # Live members know their identity themselves.
        identity=dict(task.identity) if all(member.source != "live" for member in stage.members) else {},
    )

    def build(base: dict[str, Any], _: list[str]) -> Command:
        return alike.model_copy(update=base)

    return _per_node(state, part, phase, phases.members(stage), build, salt=f"{store.host}:{store.port}")


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
