"""What the planner's additions to the paper's objective gain in simulated histories, each switched off alone.

    .venv/bin/python -m benchmarks.rollouts [--traces trace-a,trace-b,short-outages] [--seeds 8] [--pause-s 0]

All runs have the timing of the policy ``unicron``; ``--pause-s``: with transitions that take so much longer. One JSON
line a trace: the gain in accumulated WAF over the objective alone, in percent, in the mean and on the worst seed. The
bounds: all additions together lose no more than 0.5% on any seed, and nothing in the mean.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from functools import partial

from benchmarks.report import Report, at_least, run
from simulator.engine import simulate
from simulator.paper_workloads import workload
from simulator.policies import POLICIES
from simulator.policies.timing import LiveTiming
from simulator.policy import Policy

OFF: dict[str, float] = {"rollouts": 0, "spare_nodes_max": 0, "memory_copies": 0}
"""Parameters by which plans follow the paper's objective alone."""

ON: dict[str, float] = {"rollouts": 32, "spare_nodes_max": 1}
"""Parameters that switch on what is off by default."""

WITHOUT: dict[str, dict[str, float]] = {
    "all": {},
    "without rollouts": {"rollouts": 0},
    "without spare nodes": {"spare_nodes_max": 0},
    "without copies in memory": {"memory_copies": 0},
}
"""What is compared with the objective alone."""

WORST_LOSS_PERCENT = 0.5
"""Most that all additions may lose on a seed."""


def variant(parameters: dict[str, float], pause_s: float) -> Policy:
    """Return the policy ``unicron`` with other parameters, and transitions that take ``pause_s`` longer."""
    policy = POLICIES["unicron"]
    timing = policy.timing
    assert isinstance(timing, LiveTiming)
    prior = {"transition_prior_s": timing.pause_s + pause_s} if pause_s else {}
    slower = replace(timing, pause_s=timing.pause_s + pause_s)
    return replace(policy, timing=slower, parameters={**policy.parameters, **ON, **prior, **parameters})


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print."""
    for name in options.traces.split(","):
        gains: dict[str, list[float]] = {label: [] for label in WITHOUT}
        for seed in range(options.seeds):
            work = workload(name, seed)
            base = simulate(work, variant(OFF, options.pause_s), seed, costs=False).accumulated_waf_flop
            for label, parameters in WITHOUT.items():
                found = simulate(work, variant(parameters, options.pause_s), seed, costs=False).accumulated_waf_flop
                gains[label].append(100.0 * (found / base - 1.0))
        report.line(
            "gain",
            trace=name,
            seeds=options.seeds,
            pause_s=options.pause_s,
            mean_percent={label: round(statistics.fmean(each), 4) for label, each in gains.items()},
            worst_percent={label: round(min(each), 4) for label, each in gains.items()},
        )
        report.at_least(f"{name}: gain on the worst seed, percent", min(gains["all"]), -WORST_LOSS_PERCENT)
        report.at_least(f"{name}: gain in the mean, percent", statistics.fmean(gains["all"]), 0.0)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.rollouts", description="Gains of the planner's additions.")
    parser.add_argument("--traces", default="trace-a,trace-b,short-outages", help="names of workloads")
    parser.add_argument("--seeds", type=at_least(1), default=8)
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds that every transition takes longer")
    return run(partial(measure, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
