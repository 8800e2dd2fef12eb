"""ByteRobust-like: inspections, warm standby nodes, restarts in place, a checkpoint at every step (SOSP'25).

Inspections of hosts, devices and networks find explicit faults in seconds; hangs show by silence of the network.
Suspect nodes are replaced by standbys that have run their self-tests, and all processes start again in the containers
that are there. Each step's state is copied beside the computation, also to another node, so at most one step is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.events.severities import ErrorKind
from simulator.policies.parameters import common, value
from simulator.policies.restriction import solve_without_taking
from simulator.policies.timing import Detection, departure, is_departure, state_source
from simulator.policy import Course, Policy, Recovery

_DETECTION = Detection(
    node_s=value("byterobust", "network_detection_s"),
    process_s=value("byterobust", "host_detection_s"),
    exception_s=value("byterobust", "device_detection_s"),
    hang_s=value("byterobust", "hang_detection_s"),
    link_s=value("byterobust", "network_detection_s"),
)

_RESOLUTION = {
    ErrorKind.NODE_LOST: "host_resolution_s",
    ErrorKind.BROKEN_LINK: "network_resolution_s",
    ErrorKind.CONNECTION: "network_resolution_s",
    ErrorKind.COLLECTIVE_TIMEOUT: "network_resolution_s",
    ErrorKind.DEVICE: "device_resolution_s",
    ErrorKind.NON_FINITE: "nan_resolution_s",
}
"""Kind of an error -> the symptom of table 6 that it stands for; others: ``cuda_resolution_s``."""


@dataclass(frozen=True, slots=True)
class StandbyTiming:
    """Resolution, then a restart in place; without a free standby the task waits and is queued anew.

    No recovery needs a checkpoint in storage, since each step is copied.
    """

    checkpoint_every_s: float

    def detection_s(self, kind: ErrorKind, step_s: float, micro_batches: int = 1) -> float:
        """Return the time from a fault to its detection, seconds."""
        return _DETECTION.of(kind, step_s, micro_batches)

    def course(self, recovery: Recovery) -> Course:
        """Return the restart in place, or the return from the queue."""
        if is_departure(recovery.change):
            return departure(recovery, "step")
        if not recovery.affected and state_source(recovery.change) == "saved":
            return Course(down_s=value("byterobust", "requeue_s"))
        if not recovery.affected:
            return Course(down_s=common("process_start_s"))
        return Course(down_s=resolution_s(recovery.kind) + common("process_start_s"), lost="step")


def resolution_s(kind: ErrorKind | None) -> float:
    """Return the time in which a fault of this kind is found out and its node replaced, seconds (table 6, means)."""
    symptom = _RESOLUTION.get(kind, "cuda_resolution_s") if kind is not None else "cuda_resolution_s"
    return value("byterobust", symptom)


BYTEROBUST = Policy(
    name="byterobust",
    title="ByteRobust-like: warm standbys",
    source="ByteRobust, SOSP'25, tables 3, 6, 7 and 8",
    scope="fixed",
    timing=StandbyTiming(checkpoint_every_s=value("byterobust", "checkpoint_every_s")),
    solve=solve_without_taking,
    efficiency=value("byterobust", "efficiency"),
    spare_nodes=int(value("byterobust", "spare_nodes")),
    assumptions=(
        "Times published for 2,048 GPUs and more hold for smaller tasks, too.",
        "Copies of each step outlive any lost node, also of a task that waits.",
        "Each kind of error takes the mean of the symptom of table 6 that is nearest to it.",
        "Slow nodes are found, as its inspections find them, and handled as the live planner handles them.",
        "A single node is the standby pool of 16: the paper sizes it for the 99th percentile of simultaneous failures.",
    ),
)
