"""Outcomes and workloads that tests of the report are made of."""

from __future__ import annotations

from shared.costs.ledger import CATEGORIES
from shared.tasks.specification import TaskSpec
from simulator.outcome import Outcome, WafPoint
from simulator.workloads.trace import Occurrence, Trace
from simulator.workloads.workload import Workload

DAY_S = 86_400.0


def spec(name: str = "gpt") -> TaskSpec:
    return TaskSpec.model_validate(
        {
            "name": name,
            "model": {"layers": 24, "hidden": 2048, "heads": 16, "sequence_length": 2048},
            "batch": {"global": 256, "micro": 4},
            "steps": 1_000_000,
            "data": "none",
        }
    )


def trace() -> Trace:
    return Trace(
        name="small",
        nodes=("n0", "n1", "n2"),
        present=2,
        occurrences=(
            Occurrence(0.5 * DAY_S, "n0", "error", "exception"),
            Occurrence(1 * DAY_S, "n1", "down"),
            Occurrence(2 * DAY_S, "n2", "up"),
            Occurrence(2.5 * DAY_S, "n0", "degraded", slowdown=1.5),
            Occurrence(3 * DAY_S, "n1", "up"),
        ),
        horizon_s=4 * DAY_S,
        source="drawn <by hand>",
    )


def workload(*, endless: bool = True) -> Workload:
    return Workload("small", trace(), (spec("gpt-a"), spec("gpt-b")), "a100-80", endless=endless)


def outcome(
    policy: str = "unicron", seed: int = 0, *, rate: float = 1e15, share: float = 1.0, **changes: object
) -> Outcome:
    """An outcome whose rate is ``rate`` but for the second day, of which ``share`` was kept."""
    points = [WafPoint(0.0, rate), WafPoint(DAY_S, 0.5 * rate), WafPoint(2 * DAY_S, rate)]
    kinds = dict.fromkeys(CATEGORIES.values(), 0.0)
    kinds |= {"useful": 3.0e6, "lost": 4.0e5, "detection": 1e4, "transition_incident": 2e4}
    values = {
        "policy": policy,
        "seed": seed,
        "horizon_s": 4 * DAY_S,
        "accumulated_waf_flop": 3.5 * DAY_S * rate * share,
        "worker_s": {} if policy == "oracle" else kinds,
        "allocated_worker_s": sum(kinds.values()),
        "transitions": 3,
        "recovery_s": [4.0, 8.0, 6.0],
        "waf": points,
        "completed_s": {},
        "events": 42,
    }
    return Outcome.model_validate(values | changes)
