"""What a run achieved, and what it cost."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from shared.model import Model


class WafPoint(NamedTuple):
    """Weighted achieved aggregate FLOP/s of the whole cluster from a time on."""

    at_s: float
    waf_flop_per_s: float


class Outcome(Model):
    """The result of one run of one policy.

    Attributes:
        policy: its name.
        seed: of the trace and of what the run itself draws.
        horizon_s: simulated seconds.
        accumulated_waf_flop: weighted model FLOP of all updates applied and not lost again, over the horizon.
        worker_s: worker-seconds by kind, as the cost report has them (``shared.costs.ledger.CATEGORIES``).
        allocated_worker_s: counted apart; the kinds add up to it.
        transitions: number of times that a task moved, restarted or was retried.
        recovery_s: of each fault that stopped a task: seconds from the fault to its next training step.
        waf: rate over time, a point where it changes.
        completed_s: by task that ended, the time at which it did.
        steps: by task, the updates that exist at the end, with the part of the next that is done.
        events: number of events in the log.
        unfound: faults that had occurred by the end, and that the system had not found. Their tasks stand still, and
            that counts as detection, though the log has no event of it.
    """

    policy: str
    seed: int
    horizon_s: float
    accumulated_waf_flop: float
    worker_s: dict[str, float]
    allocated_worker_s: float
    transitions: int
    recovery_s: list[float]
    waf: list[WafPoint]
    completed_s: dict[str, float]
    steps: dict[str, float] = Field(default_factory=dict)
    events: int
    unfound: int = 0
