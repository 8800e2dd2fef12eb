"""The simulator against the Unicron paper, other systems and the oracle. JSON lines; exit status 1 on a missed bound.

    .venv/bin/python -m benchmarks.evaluation [--parts ratios ...] [--traces trace-a ...] [--seeds 100]
        [--clusters 100] [--jobs 2]

Parts, in this order:

``speed``      128 GPUs for 8 weeks (trace-a) under one policy, no log, costs accounted for.
``figures``    the paper's figures 1, 2 and 4 and its detection times, with ours beside them; nothing is required.
``ratios``     Unicron as published to Megatron, Oobleck, Varuna and Bamboo on trace-a and trace-b, beside the paper's
               ratios: means over the five cases of tasks and weights with ``RATIO_SEEDS`` seeds each. Where a ratio is
               more than 15% off, ``explanation`` has the efficiency of a healthy step that the other system would need,
               and the ratio of a run with it; ``losses_times``: the other way to it, all its losses so many times.
``gains``      the live planner over every published policy, paired by seed. Over Unicron as published ``--seeds``
               seeds; over the others, which are behind by more than any spread, ``OTHERS_SEEDS``. Then the same
               over each addition to the paper switched on, or off, alone. And its share of the oracle. A real trace
               is the same for every seed: one run, and no interval.
``cases``      each case of tasks and weights: the gain over Unicron as published, and the share of two oracles: the
               one that may leave light tasks without workers, and the one that admits tasks as the planner does.
``clusters``   random clusters and traces: all policies on each, with logs that are verified.
``scale``      ``benchmarks.simulator``: 2,048 nodes for 8 weeks.
``live``       ``benchmarks.simulated_live``: a simulated and a live run with the same faults.

``speed``, ``scale`` and ``live`` measure time and run alone; the others use ``--jobs`` processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from benchmarks.evaluation_gains import OURS, drawn, measure_cases, measure_gains
from benchmarks.evaluation_ratios import PAPER, measure_ratios
from benchmarks.evaluation_runs import ROUNDING, SUM_TOLERANCE, check_random
from benchmarks.evaluation_targets import published_ratios
from benchmarks.intervals import LEAST_RATIOS, REASON
from benchmarks.report import MISSED, Report, at_least, run
from benchmarks.timing import timed
from simulator import figures, published
from simulator.policies import POLICIES
from simulator.runs import Run, make
from simulator.workloads.paper_workloads import NAMES

TRACES = tuple(name for name in NAMES if name != "infinitehbd")
"""Traces of a whole run. One policy on the 400 nodes of the other one takes a minute, and a year of them is one run."""

PARTS = ("speed", "figures", "ratios", "gains", "cases", "clusters", "scale", "live")

RATIO_SEEDS = 3
"""Of each case: the spread over seeds of a ratio of means is some per cent, far below what is compared."""

STEP_S = 20.0
"""Of the table of detection times, where some are in steps: about that of GPT-3 7B on 16 A800."""

SPEED_S = 5.0
WHOLE_RUN_S = 1200.0


def measure_speed(report: Report) -> None:
    """One policy on the paper's cluster for eight weeks."""
    make(Run(drawn("trace-b"), OURS, 0, costs=False))  # what is compiled and imported once
    taken_s, outcome = timed(lambda: make(Run(drawn("trace-a"), OURS, 0)))
    report.line("speed", policy=OURS, trace="trace-a", events=outcome.events, transitions=outcome.transitions)
    report.at_most("128 GPUs for 8 weeks, s", taken_s, SPEED_S)


def measure_figures(report: Report) -> None:
    """Print the paper's single figures, with ours beside them."""
    for cause in figures.fig1():
        report.line("figure-1", **cause._asdict())
    report.line("figure-2", published_min=published.manual_recovery_min())
    for times in figures.fig2(list(POLICIES.values())):
        report.line("figure-2", **times._asdict())
    for point in figures.fig4():
        report.line("figure-4", **point._asdict())
    for policy in (PAPER, OURS):
        for found in figures.detection(POLICIES[policy], STEP_S):
            report.line("detection", policy=policy, step_s=STEP_S, **found._asdict())


def measure_clusters(report: Report, clusters: int, jobs: int) -> None:
    """Random clusters and traces under all policies."""
    checked = check_random(range(clusters), jobs)
    for each in checked:
        if each.to_oracle > 1 + ROUNDING or each.sum_error > SUM_TOLERANCE or not each.verified:
            report.line("wrong", **asdict(each))
    report.line("clusters", clusters=clusters, runs=len(checked), events=sum(each.events for each in checked))
    report.at_most("most of the oracle that a policy has", max(each.to_oracle for each in checked), 1 + ROUNDING)
    report.at_most("kinds of time: error of their sum", max(each.sum_error for each in checked), SUM_TOLERANCE)
    report.equal("logs that are not verified", sum(not each.verified for each in checked), 0)


def relay(report: Report, module: str) -> None:
    """Run another benchmark as a process, and take over its lines and bounds.

    Raises:
        CalledProcessError: it ended with an error.
    """
    done = subprocess.run([sys.executable, "-m", module], stdout=subprocess.PIPE, text=True, check=False)
    for line in map(json.loads, done.stdout.splitlines()):
        report.relay(line)
    if done.returncode not in (0, MISSED):
        raise subprocess.CalledProcessError(done.returncode, module, done.stdout)


def measure(report: Report, parts: list[str], traces: list[str], seeds: int, clusters: int, jobs: int) -> None:
    began_s = time.monotonic()
    measures: dict[str, Callable[[], None]] = {
        "speed": lambda: measure_speed(report),
        "figures": lambda: measure_figures(report),
        "ratios": lambda: measure_ratios(report, published_ratios(), RATIO_SEEDS, jobs),
        "gains": lambda: measure_gains(report, traces, seeds, jobs),
        "cases": lambda: measure_cases(report, traces, seeds, jobs),
        "clusters": lambda: measure_clusters(report, clusters, jobs),
        "scale": lambda: relay(report, "benchmarks.simulator"),
        "live": lambda: relay(report, "benchmarks.simulated_live"),
    }
    for part in PARTS:
        if part in parts:
            taken_s, _ = timed(measures[part])
            report.line("part", part=part, taken_s=taken_s)
    if set(parts) == set(PARTS) and set(traces) == set(TRACES):
        report.at_most("whole run, s", time.monotonic() - began_s, WHOLE_RUN_S)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--traces", nargs="+", choices=NAMES, default=list(TRACES), help="of gains and cases")
    parser.add_argument("--seeds", type=at_least(LEAST_RATIOS, REASON), default=100)
    parser.add_argument("--clusters", type=at_least(1), default=100)
    parser.add_argument("--jobs", type=at_least(1), default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    return run(partial(measure, **vars(given)))


if __name__ == "__main__":
    sys.exit(main())
