"""Transition costs: D_transition, the time that a change costs a task, by its kind.

    survivors   the staying workers have the state: the task shrinks, or finishes a broken step and goes on as it is
    newcomers   other workers join and take the live state: the task grows, or a lost worker is replaced
    restore     all workers read the newest checkpoint, or begin anew: no group of live workers has the whole state, or
                the new count has other tensor and pipeline sizes
    pause       the task saves its state and gives up its workers, to restore the state later

The log tells how long the task made no progress each time. The estimate of a kind is the mean of those times and the
model, which counts as one more measurement: ``transition_prior_s`` and the bytes of a worker's state over the bandwidth
of the nearest source.
"""

from __future__ import annotations

from typing import NamedTuple

from services.planner.placement.changes import keeps_state
from services.planner.placement.closed_nodes import draining_members
from services.planner.state.cluster import State, Task, TransitionKind, node_of
from services.planner.state.slow_workers import taken_members
from services.planner.throughput.tables import ThroughputTable, table_of
from shared.events.plans import TaskChange
from shared.planning.performance import hardware
from shared.planning.performance.device_memory import STATE_BYTES

CPU_STATE_BYTES = 16
"""Bytes of a parameter trained in fp32: weight 4, gradient 4, two Adam moments 8. A GPU has 18, with a 16-bit copy."""

GRID = 1.1
"""Factor between two times on the grid of D_running and D_transition. Both are known less exactly than that."""

LEAST_ON_GRID_S = 1e-3
"""Times below this stay as they are, because no decision depends on them."""


class TransitionCost(NamedTuple):
    """D_transition of a task, seconds, in the form of ``TaskProblem``.

    ``transition_s``: the cost of a count up to ``staying``. ``newcomers_s``: added above ``staying``. ``to_s``: the
    cost of single counts, in place of both. ``reload_s``: the cost of the counts that the throughput table calls
    ``reloading``; None if there are none.
    """

    transition_s: float
    to_s: dict[int, float]
    staying: int
    newcomers_s: float
    reload_s: float | None = None


def transition_cost(state: State, task: Task, table: ThroughputTable | None = None) -> TransitionCost:
    """Return D_transition of the task for every count. ``table``: the task's, if it is at hand.

    Each part is on the grid, so that problems solved ahead stay valid although one more step would be lost meanwhile.
    """
    restore_s = _estimate_s(state, task, "restore")
    lost_s = max(0, task.step - task.checkpoint_step) * task.step_s
    to_s: dict[int, float] = {}
    if task.members:
        # A pause that saves the step loses no steps, but the saved state must be read again. Whether a fault leaves
        # whole replicas depends on which workers are lost, and problems solved ahead know only how many. So a task
        # whose replicas have several workers saves nothing after a fault. A plan in progress counts as carried out.
        saves = bool(task.live_owners) and (task.replica_size == 1 or not (task.broken or task.lost))
        saving_s = _estimate_s(state, task, "pause") if saves else lost_s
        to_s[0] = on_grid(saving_s + restore_s)
    if not is_live(state, task):
        return TransitionCost(on_grid(restore_s + lost_s), to_s, 0, 0.0)
    reloading, reload_s = (table or table_of(state, task)).reloading, on_grid(restore_s + lost_s)
    to_s |= dict.fromkeys(reloading, reload_s)
    behind_s = _behind_s(task)
    survivors_s = on_grid(_estimate_s(state, task, "survivors") + behind_s)
    newcomers_s = on_grid(_estimate_s(state, task, "newcomers") + behind_s)
    leaving = {*task.lost, *draining_members(state, task), *taken_members(state, task)}
    staying = len(task.members) - (len(leaving.intersection(task.members)) if leaving else 0)
    added_s = max(0.0, newcomers_s - survivors_s)
    return TransitionCost(survivors_s, to_s, staying, added_s, reload_s if reloading else None)


def is_live(state: State, task: Task) -> bool:
    """Return whether a worker has the task's whole state, or copies in memory complete it, so that others can take it.

    If so, all workers that are planned for the task and not lost count as staying: those that join now will soon have
    the state too.
    """
    if not task.members or not task.live_owners or task.spec.restarts_whole:
        return False
    if task.replica_size > 1 and not _has_copies(state, task):
        return False  # a fault may have hit all replicas
    return task.pool in ("", _own_kind(state, task))


def _has_copies(state: State, task: Task) -> bool:
    """Return whether snapshots in memory have what a lost worker had, and plans are to count on them."""
    return task.spec.checkpoint.in_memory and state.parameter("memory_copies") > 0.0


def _behind_s(task: Task) -> float:
    """Return the time of the steps that are computed again, in the mean, where copies complete a live state, seconds.

    The copies are half an interval older than the step that a fault has met, and all ranks go back to them. Nothing is
    lost where the workers that stay have the whole state, or where every step is copied.
    """
    if not task.memory_every or not (task.broken or task.lost) or keeps_state(task, task.live_owners):
        return 0.0
    return (task.memory_every - 1) / 2.0 * task.step_s


def kind_of_change(change: TaskChange) -> TransitionKind | None:
    """Return the kind of a change; None for the start of a task that was not running, and for its end."""
    if change.action == "pause":
        return "pause"
    stage = change.target or change.interrupted
    if stage is None or change.action not in ("move", "none"):
        return None
    sources = {member.source for member in stage.members}
    if not sources <= {"live", "take"}:
        return "restore" if change.survivors or change.failed else None
    return "newcomers" if "take" in sources else "survivors"


def on_grid(value_s: float) -> float:
    """Return the largest power of 1.1 that is not above the value, seconds (below 1 ms: the value itself).

    Times change by the moment, and an answer solved ahead must still be valid when the event comes.
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
    """Return the mean of the measured transitions of this kind and the modelled one, seconds."""
    number, total_s = state.transitions.get(kind, (0, 0.0))
    return (_modelled_s(state, task, kind) + total_s) / (1 + number)


def saving_s(state: State, task: Task) -> float:
    """Return the modelled time in which a worker writes its state to storage, seconds."""
    return max(0.0, _modelled_s(state, task, "pause") - state.parameter("transition_prior_s"))


def recovery_s(state: State, task: Task) -> float:
    """Return the estimated time in which a task has replaced a lost worker, and its state, seconds."""
    return _estimate_s(state, task, "newcomers")


def _modelled_s(state: State, task: Task, kind: TransitionKind) -> float:
    """Return the fixed cost plus a worker's state in bytes over the bandwidth of its source or target, seconds."""
    fixed_s = state.parameter("transition_prior_s")
    stored = kind == "pause" or (kind == "restore" and task.checkpoint != "")
    if kind != "newcomers" and not stored:
        return fixed_s
    profile = _hardware(state, task)
    state_bytes = bytes_per_parameter(profile) * task.spec.model.parameters() / task.replica_size
    bytes_per_s = state.parameter("storage_bytes_per_s") if stored else profile.inter_bytes_per_s
    return fixed_s + state_bytes / bytes_per_s


def bytes_per_parameter(profile: hardware.Hardware) -> int:
    """Return the bytes of a parameter with its gradient and its optimizer state on such workers."""
    return STATE_BYTES if profile.multiprocessors > 1 else CPU_STATE_BYTES


def _hardware(state: State, task: Task) -> hardware.Hardware:
    """Return the profile of the workers that the task has or gets; that of ``cpu`` where the kind is unknown."""
    kind = task.pool or _own_kind(state, task) or _first_kind(state)
    return hardware.profile(kind if kind in hardware.names() else "cpu")


def _own_kind(state: State, task: Task) -> str:
    """Return the kind of the task's workers; empty if it has none."""
    nodes = (state.nodes.get(node_of(worker)) for worker in task.members)
    return next((node.hardware for node in nodes if node is not None), "")


def _first_kind(state: State) -> str:
    """Return the kind of the first usable node by name; empty if no node is usable."""
    return next((state.nodes[name].hardware for name in sorted(state.nodes) if state.nodes[name].usable), "")
