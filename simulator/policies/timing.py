"""Timings that several policies share: how faults are found, and how tasks go on from live replicas or checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.events.plans import TaskChange
from shared.events.severities import ErrorKind
from shared.planning.performance import hardware
from simulator.policies.parameters import common
from simulator.policy import Course, Lost, Recovery

StateSource = Literal["live", "memory", "checkpoint", "saved"]
"""Where the state of a stage comes from. ``live``: its own members. ``memory``: copies of the last step beside live
members that lack a part. ``checkpoint``: the newest one, since no process of the task is left. ``saved``: the same, for
a task that has waited."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Seconds from a fault to its detection, by the method that finds it (Unicron paper, table 1).

    ``node_s``: loss of a node. ``process_s``: end of a process, broken connections. ``exception_s``: exceptions, device
    errors and values that are not finite. ``hang_s``: hangs and collectives that time out, at least. Their limit is the
    lower of ``hang_steps`` mean steps, and ``hang_gaps`` times the longest time without progress in a healthy step
    (``gap_s``); None: the system compares steps only. ``link_s``: a broken link between nodes; None: as a hang.
    """

    node_s: float
    process_s: float
    exception_s: float
    hang_s: float
    hang_steps: float = 0.0
    hang_gaps: float | None = None
    link_s: float | None = None

    def of(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        """Return the time to the detection of a fault of this kind, seconds."""
        match kind:
            case ErrorKind.NODE_LOST | ErrorKind.REPORTED:
                return self.node_s
            case ErrorKind.PROCESS_EXIT | ErrorKind.CONNECTION | ErrorKind.TRANSITION_FAILED:
                return self.process_s
            case ErrorKind.EXCEPTION | ErrorKind.DEVICE | ErrorKind.NON_FINITE | ErrorKind.DIFFERENCE:
                return self.exception_s
            case ErrorKind.BROKEN_LINK if self.link_s is not None:
                return self.link_s
            case ErrorKind.HANG | ErrorKind.COLLECTIVE_TIMEOUT | ErrorKind.BROKEN_LINK:
                limit_s = self.hang_steps * step_s
                if self.hang_gaps is not None:
                    limit_s = min(limit_s, self.hang_gaps * gap_s(step_s, micro_batches))
                return max(self.hang_s, limit_s)


def gap_s(step_s: float, micro_batches: int) -> float:
    """Return the longest time without progress of a rank in a healthy step, seconds.

    That is a micro-batch, or the reduction of gradients.
    """
    return step_s * max(1.0 / micro_batches, common("reduction_steps"))


def state_source(change: TaskChange) -> StateSource:
    """Return where the state of the change's last stage comes from; of a change without stages ``live``."""
    stages = change.stages
    if not stages:
        return "live"
    whole = all(stage.complete for stage in stages)
    stored = any(member.source in ("checkpoint", "initial", "script") for member in stages[-1].members)
    if whole and not stored:
        return "live"
    if change.survivors:
        return "memory"
    return "checkpoint" if change.failed else "saved"


def is_departure(change: TaskChange) -> bool:
    """Return whether the task gives up all its workers."""
    return change.action in ("pause", "stop", "end")


def loading_s(recovery: Recovery) -> float:
    """Return the time in which all workers read their state from storage, seconds."""
    return recovery.state_bytes_per_worker / common("storage_bytes_per_s")


def moving_s(recovery: Recovery) -> float:
    """Return the time in which a worker takes its state from a live one, seconds; 0 if no worker has to."""
    takes = any(member.source == "take" for stage in recovery.change.stages for member in stage.members)
    if not takes:
        return 0.0
    return recovery.state_bytes_per_worker / hardware.profile(recovery.hardware).inter_bytes_per_s


def departure(recovery: Recovery, lost: Lost) -> Course:
    """Return how a task gives up its workers: it saves its state, unless a fault has broken it; then it loses ``lost``.

    What was lost shows at once. The task begins again when it gets workers, in another recovery.
    """
    if recovery.affected:
        return Course(down_s=0.0, lost=lost)
    return Course(down_s=loading_s(recovery))


@dataclass(frozen=True, slots=True)
class RestartTiming:
    """A system whose answer to any fault is a restart of the whole task from its newest checkpoint.

    ``failed_s``: from the detection of a fault to the first new step. ``planned_s``: the same of a start or move
    without a fault. Both without the time to read the checkpoint if ``loads``.
    """

    detection: Detection
    checkpoint_every_s: float
    failed_s: float
    planned_s: float
    loads: bool

    def detection_s(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        """Return the time from a fault to its detection, seconds."""
        return self.detection.of(kind, step_s, micro_batches)

    def course(self, recovery: Recovery) -> Course:
        """Return the restart."""
        if is_departure(recovery.change):
            return departure(recovery, "checkpoint")
        reading_s = loading_s(recovery) if self.loads else 0.0
        if recovery.affected:
            return Course(down_s=self.failed_s + reading_s, lost="checkpoint")
        return Course(down_s=self.planned_s + reading_s)


@dataclass(frozen=True, slots=True)
class LiveTiming:
    """A system whose survivors go on, and whose newcomers take the state from them.

    Survivors stand still for ``pause_s`` and ``pause_steps`` steps at each change of members, and lose ``lost`` if a
    fault broke a step. A process takes ``start_s`` to start; meanwhile the survivors train if whole replicas are left.
    Copies of the state in memory, if there are any (``has_copies``), replace what no live replica has: the task then
    loses the interrupted step. Otherwise it starts from the newest checkpoint. ``fault_pause_s``: in place of
    ``pause_s`` where a fault has broken the step, which survivors may finish in a group of their own; None: the same.
    """

    detection: Detection
    checkpoint_every_s: float
    pause_s: float
    start_s: float
    lost: Lost
    pause_steps: float = 0.0
    has_copies: bool = False
    fault_pause_s: float | None = None

    def detection_s(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        """Return the time from a fault to its detection, seconds."""
        return self.detection.of(kind, step_s, micro_batches)

    def course(self, recovery: Recovery) -> Course:
        """Return the way from the nearest state to training again."""
        change = recovery.change
        if is_departure(change):
            return departure(recovery, "step" if self.has_copies and change.survivors else "checkpoint")
        source = state_source(change)
        pause_s = self.pause_s
        if recovery.affected and self.fault_pause_s is not None:
            pause_s = self.fault_pause_s
        if source in ("checkpoint", "saved") or (source == "memory" and not self.has_copies):
            down_s = pause_s + self.start_s + loading_s(recovery)
            return Course(down_s=down_s, lost="checkpoint" if recovery.affected else "nothing")
        still_s = pause_s + self.pause_steps * recovery.step_s + moving_s(recovery)
        start_s = self.start_s if change.prepare else 0.0
        if not recovery.affected:
            return Course(down_s=still_s, stop_s=start_s)  # it trains on while newcomers start
        if source == "memory":
            return Course(down_s=still_s + start_s, lost="step")
        goes_on = change.interrupted is not None
        down_s = still_s + start_s
        meanwhile = start_s / down_s if goes_on and down_s > 0.0 else 0.0
        return Course(down_s=down_s, lost=self.lost, meanwhile=meanwhile)
