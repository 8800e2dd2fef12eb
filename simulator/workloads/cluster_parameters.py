"""What a simulated cluster may be configured with: the numbers of ``cluster.configured``."""

from __future__ import annotations

from collections.abc import Mapping

from shared.events.base import ClusterEvent
from shared.events.union import ClusterConfigured
from shared.planning.performance import profile

PARAMETERS = frozenset(
    name
    for name, field in ClusterConfigured.model_fields.items()
    if name not in ClusterEvent.model_fields and field.annotation in (float, int, bool) and name != "schema_version"
)
"""Names of the parameters."""


def peak_flop_per_s(hardware: str, parameters: Mapping[str, float]) -> float:
    """Return the greatest rate of a worker, FLOP/s; of CPU processes, what is configured if that is more."""
    peak = profile(hardware).peak_flop_per_s
    return max(peak, parameters.get("worker_flop_per_s", 0.0)) if profile(hardware).stack == "cpu" else peak
