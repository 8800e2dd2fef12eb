"""What the planner's additions to the paper's objective gain in simulated histories, each switched on alone.

    .venv/bin/python -m benchmarks.rollouts [--traces trace-a,trace-b,short-outages,two-tasks] [--seeds 8] [--pause-s 0]

All runs have the timing of the policy ``unicron``; ``--pause-s``: with transitions that take so much longer. One JSON
line a trace: the gain in accumulated WAF over the objective alone, in percent: the mean over seeds with its 95%
interval (Student's t, paired by seed), and the worst seed. ``two-tasks`` is made for the look-ahead: nodes are back
after 2 to 30 minutes, and two tasks have just the workers that they can use, so that the objective gives the heavier
one workers of the other for each outage. The bounds: all additions together lose no more than 0.5% on any seed, and
nothing in the mean beyond what may be chance.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.report import Report, at_least, run
from shared.tasks import Workers
from simulator import generators
from simulator.engine import simulate
from simulator.paper_tasks import LEAST_WORKERS, PAPER_WORKERS, task
from simulator.paper_workloads import with_tasks, workload
from simulator.policies import POLICIES
from simulator.policies.timing import LiveTiming
from simulator.policy import Policy
from simulator.workload import Workload

OFF: dict[str, float] = {"rollouts": 0, "spare_nodes_max": 0, "memory_copies": 0}
"""Parameters by which plans follow the paper's objective alone."""

ROLLOUTS = 32
"""Futures of a plan where they are switched on."""

PARTS: dict[str, dict[str, float]] = {
    "look-ahead": {"rollouts": ROLLOUTS},
    "look-ahead and spare nodes": {"rollouts": ROLLOUTS, "spare_nodes_max": 1},
    "copies in memory": {"memory_copies": 1},
    "all": {"rollouts": ROLLOUTS, "spare_nodes_max": 1, "memory_copies": 1},
}
"""What is switched on, and compared with the objective alone."""

TWO_TASKS = "two-tasks"
"""The workload that is made for the look-ahead."""

HEAVY = 1.3
"""Weight of the heavier of two tasks: enough that a worker of it is worth more than one of the other."""

WORST_LOSS_PERCENT = 0.5
"""Most that all additions may lose on a seed."""

CONFIDENCE = 0.95
"""Of intervals."""


def named(name: str, seed: int) -> Workload:
    """Return a workload of the simulator, or the one that is made for the look-ahead."""
    if name != TWO_TASKS:
        return workload(name, seed)
    half = Workers(min=LEAST_WORKERS, max=PAPER_WORKERS // 2)
    tasks = (task("heavy", "7B", weight=HEAVY), task("light", "7B", weight=1.0))
    bounded = tuple(each.model_copy(update={"workers": half}) for each in tasks)
    return with_tasks(generators.short_outages(seed), bounded)


def variant(parameters: dict[str, float], pause_s: float) -> Policy:
    """Return the policy ``unicron`` with these parameters alone, and transitions that take ``pause_s`` longer."""
    policy = POLICIES["unicron"]
    timing = policy.timing
    assert isinstance(timing, LiveTiming)
    prior = {"transition_prior_s": timing.pause_s + pause_s} if pause_s else {}
    slower = replace(timing, pause_s=timing.pause_s + pause_s)
    return replace(policy, timing=slower, parameters={**policy.parameters, **OFF, **prior, **parameters})


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the confidence interval of the mean; without end for a single value."""
    import scipy.stats  # a second, which whoever asks for help need not wait

    number = len(values)
    if number < 2:
        return math.inf
    t = float(scipy.stats.t.ppf((1.0 + CONFIDENCE) / 2.0, number - 1))
    return t * statistics.stdev(values) / math.sqrt(number)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print."""
    for name in options.traces.split(","):
        gains: dict[str, list[float]] = {label: [] for label in PARTS}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            work = named(name, seed)
            base = simulate(work, variant({}, options.pause_s), seed, costs=False).accumulated_waf_flop
            for label, parameters in PARTS.items():
                found = simulate(work, variant(parameters, options.pause_s), seed, costs=False).accumulated_waf_flop
                gains[label].append(100.0 * (found / base - 1.0))
        report.line(
            "gain",
            trace=name,
            seeds=options.seeds,
            pause_s=options.pause_s,
            mean_percent={label: round(statistics.fmean(each), 4) for label, each in gains.items()},
            plus_minus_percent={label: round(half_interval(each), 4) for label, each in gains.items()},
            worst_percent={label: round(min(each), 4) for label, each in gains.items()},
        )
        most = statistics.fmean(gains["all"]) + half_interval(gains["all"])
        report.at_least(f"{name}: gain on the worst seed, percent", min(gains["all"]), -WORST_LOSS_PERCENT)
        report.at_least(f"{name}: upper end of the interval of the mean gain, percent", most, 0.0)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.rollouts", description="Gains of the planner's additions.")
    parser.add_argument("--traces", default=f"trace-a,trace-b,short-outages,{TWO_TASKS}", help="names of workloads")
    parser.add_argument("--seeds", type=at_least(1), default=8)
    parser.add_argument("--first-seed", type=at_least(0), default=0)
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds that every transition takes longer")
    return run(partial(measure, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
