"""A workload: a cluster and its parameters, the tasks that it is to run, and what happens to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.events.base import ClusterEvent
from shared.events.union import ClusterConfigured
from shared.planning.performance import profile
from shared.tasks.specification import TaskSpec
from simulator.workloads.trace import Trace


@dataclass(frozen=True)
class Workload:
    """What a run simulates.

    ``hardware``: kind of all workers, a profile of the throughput model (``shared.planning.performance.hardware``).
    ``workers_per_node``: of every node of the trace. ``tasks``: submitted before the trace begins, and trained at full
    strength by then. ``parameters``: of decisions, fields of ``cluster.configured`` that differ from the defaults of
    the settings. ``endless``: whether tasks outlast the horizon, so that accumulated WAF can be compared with the
    oracle's. ``times``: what was measured of this cluster in place of a policy's times (``measured_times.TIMES``).
    ``throughput``: measured over modelled, by task.
    """

    name: str
    trace: Trace
    tasks: tuple[TaskSpec, ...]
    hardware: str
    workers_per_node: int = 8
    parameters: dict[str, float] = field(default_factory=dict)
    endless: bool = True
    times: Mapping[str, float] = field(default_factory=dict)
    throughput: Mapping[str, float] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Workers of all nodes that are there at the start."""
        return self.trace.present * self.workers_per_node


PARAMETERS = frozenset(
    name
    for name, field in ClusterConfigured.model_fields.items()
    if name not in {*ClusterEvent.model_fields, "decider"} and field.annotation in (float, int, bool)
)
"""Names of the parameters."""


def peak_flop_per_s(hardware: str, parameters: Mapping[str, float]) -> float:
    """Return the greatest rate of a worker, FLOP/s; of CPU processes, what is configured if that is more."""
    peak = profile(hardware).peak_flop_per_s
    return max(peak, parameters.get("worker_flop_per_s", 0.0)) if profile(hardware).stack == "cpu" else peak
