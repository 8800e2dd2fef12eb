"""Times that were measured on a cluster, in place of those that a policy assumes.

The times of the live planner's policy hold for clusters of GPUs. What a running system takes is in its own log
(``simulator.run.calibration``), or is given in a cluster file. Other policies keep the times that their papers publish;
only how often checkpoints are written is the user's choice, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shared.events.severities import ErrorKind
from simulator.policies.timing import LiveTiming
from simulator.policies.unicron import UNICRON
from simulator.policy import Course, Policy, Recovery, Timing

CHECKPOINT = "checkpoint_every_s"

TIMES = {
    "node_detection_s": "from the loss of a node to its detection",
    "process_detection_s": "from the end of a process, or a broken connection, to its detection",
    "exception_detection_s": "from an exception, a device error or a value that is not finite to its detection",
    "hang_detection_s": "from a hang, or a collective that times out, to its detection",
    "link_detection_s": "from the break of a link between nodes to its detection",
    "pause_s": "for which a task stands still when its members change without a fault",
    "fault_pause_s": "for which a task stands still after a fault, without detection and the start of processes",
    "process_start_s": "for a process to start and be ready to join",
    CHECKPOINT: "between two checkpoints to storage",
}
"""Names of the times, and what each one is, in seconds."""


def assumed_times() -> dict[str, float]:
    """Return the times of the live planner's policy where nothing was measured."""
    timing = UNICRON.timing
    assert isinstance(timing, LiveTiming)
    found = timing.detection
    return {
        "node_detection_s": found.node_s,
        "process_detection_s": found.process_s,
        "exception_detection_s": found.exception_s,
        "hang_detection_s": found.hang_s,
        "link_detection_s": found.hang_s if found.link_s is None else found.link_s,
        "pause_s": timing.pause_s,
        "fault_pause_s": timing.pause_s if timing.fault_pause_s is None else timing.fault_pause_s,
        "process_start_s": timing.start_s,
        CHECKPOINT: timing.checkpoint_every_s,
    }


def on_cluster(policy: Policy, times: Mapping[str, float]) -> Policy:
    """Return a policy with the times of a cluster.

    Args:
        policy: as published; of the live planner's, all times are replaced, of others how often they write checkpoints.
        times: by name (``TIMES``); one that is not given stays as it is.
    """
    timing = policy.timing
    if policy.name == UNICRON.name and isinstance(timing, LiveTiming):
        timing = _measured(timing, times)
    return policy if not times else replace(policy, timing=ChangedTiming(timing, checkpoint_s=times.get(CHECKPOINT)))


def _measured(timing: LiveTiming, times: Mapping[str, float]) -> LiveTiming:
    detection = timing.detection
    given = {
        name: times[f"{name.removesuffix('_s')}_detection_s"]
        for name in ("node_s", "process_s", "exception_s", "hang_s", "link_s")
        if f"{name.removesuffix('_s')}_detection_s" in times
    }
    if "hang_s" in given:
        detection = replace(detection, hang_steps=0.0, hang_gaps=None)  # measured as a whole, whatever the step took
    return replace(
        timing,
        detection=replace(detection, **given),
        pause_s=times.get("pause_s", timing.pause_s),
        fault_pause_s=times.get("fault_pause_s", timing.fault_pause_s),
        start_s=times.get("process_start_s", timing.start_s),
    )


@dataclass(frozen=True, slots=True)
class ChangedTiming:
    """A timing with some of its times replaced, whatever policy it belongs to.

    ``node_s``: from the loss of a node to its detection. ``checkpoint_s``: between checkpoints. None: as it was.
    """

    timing: Timing
    node_s: float | None = None
    checkpoint_s: float | None = None

    @property
    def checkpoint_every_s(self) -> float:
        """Seconds between two checkpoints to storage."""
        return self.timing.checkpoint_every_s if self.checkpoint_s is None else self.checkpoint_s

    def detection_s(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        """Return the time from a fault to its detection, seconds."""
        if kind is ErrorKind.NODE_LOST and self.node_s is not None:
            return self.node_s
        return self.timing.detection_s(kind, step_s, micro_batches)

    def course(self, recovery: Recovery) -> Course:
        """Return how a task gets from a plan to training again."""
        return self.timing.course(recovery)
