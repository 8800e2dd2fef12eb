"""D_transition: the time that a change costs a task, by its kind (DESIGN section 3).

    survivors   those that stay hold the state: it shrinks, or finishes a broken step and goes on as it is
    newcomers   others join and take the live state: it grows, or a lost worker is replaced
    restore     all read the newest checkpoint, or begin anew: nobody holds the whole state, or the new count has
                other tensor and pipeline sizes
    pause       it saves its state and gives up its workers, to restore it one day

The log tells how long the task stood still each time. The estimate of a kind is the mean of those times with the model
as one more: ``transition_prior_s`` and the bytes of a worker's state over the bandwidth of the nearest source.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from services.planner.state import State, Task, TransitionKind, node_of
from services.planner.tables import table_of
from shared.planning.performance import hardware
from shared.planning.performance.memory import STATE_BYTES
from shared.plans import TaskChange

CPU_STATE_BYTES = 16
"""A parameter trained in fp32: weight 4, gradient 4, two Adam moments 8 (without the 16-bit copy of a GPU's 18)."""

GRID = 1.1
"""Step of D_running and D_transition: finer than anyone knows either."""

LEAST_ON_GRID_S = 1e-3
"""Shorter times are taken as they are: no decision turns on them."""


class Transition(NamedTuple):
    """D_transition as a problem has it (``TaskProblem``), seconds."""

    transition_s: float
    to_s: dict[int, float]
    staying: int
    newcomers_s: float


def transition(state: State, task: Task) -> Transition:
    """Return D_transition of the task for every count.

    Parts are put on a grid, so that problems solved ahead hold although a step more would be lost meanwhile.
    """
    restore_s = _estimate_s(state, task, "restore")
    lost_s = max(0, task.step - task.checkpoint_step) * task.step_s
    to_s: dict[int, float] = {}
    if task.members:
        # A step that is saved is not lost, but what is saved must be read again. Whether a fault leaves whole replicas
        # depends on who is lost; problems solved ahead know how many. A plan under way counts as carried out.
        saves = bool(task.kept) and (task.replica == 1 or not (task.broken or task.lost))
        saving_s = _estimate_s(state, task, "pause") if saves else lost_s
        to_s[0] = on_grid(saving_s + restore_s)
    if not is_live(state, task):
        return Transition(on_grid(restore_s + lost_s), to_s, 0, 0.0)
    to_s |= dict.fromkeys(table_of(state, task).reloading, on_grid(restore_s + lost_s))
    survivors_s = on_grid(_estimate_s(state, task, "survivors"))
    newcomers_s = on_grid(_estimate_s(state, task, "newcomers"))
    staying = len(task.members) - len(set(task.lost).intersection(task.members))
    return Transition(survivors_s, to_s, staying, max(0.0, newcomers_s - survivors_s))


def is_live(state: State, task: Task) -> bool:
    """Return whether there is a worker that holds the task's whole state, which others can take from it.

    Then all that were planned for it and are left count as staying: those that join now will soon hold the state too.
    """
    if task.replica > 1 or not task.members or not task.kept:
        return False
    return task.pool in ("", _own_kind(state, task))


def kind_of(change: TaskChange) -> TransitionKind | None:
    """Return the kind of a change; None for the start of a task that was not running, and for the end of one."""
    if change.action == "pause":
        return "pause"
    stage = change.target or change.interrupted
    if stage is None or change.action not in ("move", "none"):
        return None
    sources = {member.source for member in stage.members}
    if not sources <= {"live", "take"}:
        return "restore" if change.survivors or change.failed else None
    return "newcomers" if "take" in sources else "survivors"


@lru_cache(maxsize=4096)
def on_grid(value_s: float) -> float:
    """Return the largest power of 1.1 that is not above the value, seconds (below 1 ms: the value itself).

    Times change by the moment; what was solved ahead for a moment ago has to hold for the event when it comes.
    """
    if value_s < LEAST_ON_GRID_S:
        return value_s
    below = 1.0
    while below > value_s:
        below = below / GRID
    while below * GRID <= value_s:
        below = below * GRID
    return below


def _estimate_s(state: State, task: Task, kind: TransitionKind) -> float:
    """Return the mean of the measured transitions of this kind, with the model as one more, seconds."""
    number, total_s = state.transitions.get(kind, (0, 0.0))
    return (_modelled_s(state, task, kind) + total_s) / (1 + number)


def _modelled_s(state: State, task: Task, kind: TransitionKind) -> float:
    """Return the fixed cost and a worker's bytes over the bandwidth of where they come from or go to, seconds."""
    fixed_s = state.parameter("transition_prior_s")
    stored = kind == "pause" or (kind == "restore" and task.checkpoint != "")
    if kind != "newcomers" and not stored:
        return fixed_s
    profile = _hardware(state, task)
    each = STATE_BYTES if profile.multiprocessors > 1 else CPU_STATE_BYTES
    state_bytes = each * task.spec.model.parameters() / task.replica
    bytes_per_s = state.parameter("storage_bytes_per_s") if stored else profile.inter_bytes_per_s
    return fixed_s + state_bytes / bytes_per_s


def _hardware(state: State, task: Task) -> hardware.Hardware:
    """Return the profile of the workers that the task gets; ``cpu`` where it is not known."""
    kind = task.pool or _own_kind(state, task) or _first_kind(state)
    return hardware.profile(kind if kind in hardware.names() else "cpu")


def _own_kind(state: State, task: Task) -> str:
    nodes = (state.nodes.get(node_of(worker)) for worker in task.members)
    return next((node.hardware for node in nodes if node is not None), "")


def _first_kind(state: State) -> str:
    return next((state.nodes[name].hardware for name in sorted(state.nodes) if state.nodes[name].usable), "")
