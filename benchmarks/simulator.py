"""How fast histories are simulated, and what a failure costs. One JSON line a course.

    .venv/bin/python -m benchmarks.simulator [--nodes 2048] [--tasks 64] [--weeks 8] [--policy unicron]

``paper``: 128 GPUs, the paper's six tasks, trace-a (8 weeks), one policy, costs accounted for, no log; once before the
clock starts, so that all is compiled. ``large``: nodes with 8 workers for some weeks at trace-a's rate per node, with a
log in a file, no costs; each kind of failure in a run of its own. The tasks are submitted one after the other before
the trace begins (``start_s``), each with a plan of its own that divides the whole cluster. The processor's seconds
behind that, the log's included, are divided by the failures; a loss includes the node's return. Memory is the most that
the process ever had. ``--weeks`` shortens the course; rates per node stay.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Report, run
from shared.log.log import EventLog
from shared.tasks.specification import TaskSpec, parse_spec
from simulator.policies import POLICIES
from simulator.run.engine import simulate
from simulator.workloads.paper_workloads import workload
from simulator.workloads.trace import Occurrence, Trace
from simulator.workloads.workload import Workload

DAY_S = 86_400.0
WEEK_S = 7 * DAY_S

LOSSES_PER_NODE_WEEK = 10 / 16 / 8
"""Trace-a of the Unicron paper: 10 losses of nodes among 16 nodes in 8 weeks."""

LIGHTER_PER_NODE_WEEK = 33 / 16 / 8
"""The same trace: 33 lighter failures."""

REPAIR_S = DAY_S
"""A lost node is back a day later, so that a few percent of the nodes are away at any time."""

KINDS = ("process-exit", "connection", "hang", "exception", "collective-timeout")
"""Lighter failures: they stop a task and leave its nodes."""

SHAPES = ((2048, 24, 16), (4096, 32, 32), (5120, 40, 40), (2560, 32, 32))
"""Hidden size, layers and heads: GPT-3 1.3B, 6.7B, 13B and 2.7B (Brown et al., NeurIPS'20, table 2.1)."""


class Scale(NamedTuple):
    """Of the large course."""

    nodes: int
    tasks: int
    weeks: float
    policy: str


def large(scale: Scale, *, losses: bool = True, lighter: bool = True) -> Workload:
    """Return the large workload, or its part with one kind of failure. No task ends within it."""
    source = random.Random(1)
    nodes = tuple(f"n{index:04d}" for index in range(scale.nodes))
    horizon_s = scale.weeks * WEEK_S
    found: list[Occurrence] = []
    for _ in range(round(LOSSES_PER_NODE_WEEK * scale.nodes * scale.weeks)):
        at_s, node = source.uniform(0.0, horizon_s), source.choice(nodes)
        if losses:
            found.append(Occurrence(at_s, node, "down"))
            if at_s + REPAIR_S <= horizon_s:
                found.append(Occurrence(at_s + REPAIR_S, node, "up"))
    for _ in range(round(LIGHTER_PER_NODE_WEEK * scale.nodes * scale.weeks)):
        each = Occurrence(source.uniform(0.0, horizon_s), source.choice(nodes), "error", source.choice(KINDS))
        if lighter:
            found.append(each)
    trace = Trace("large", nodes, scale.nodes, tuple(sorted(found)), horizon_s)
    return Workload("large", trace, tuple(_task(index) for index in range(scale.tasks)), "a800-80")


def _task(index: int) -> TaskSpec:
    hidden, layers, heads = SHAPES[index % len(SHAPES)]
    return parse_spec(
        {
            "name": f"t{index:02d}",
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "sequence_length": 2048,
                "vocabulary": 51_200,
            },
            "batch": {"global": 1024, "micro": 1},
            "steps": 1_000_000_000,  # beyond the horizon: plans for ended tasks would count as cost of failures
            "data": "corpus",
            "weight": 0.5 + (index % 7) * 0.25,
            "workers": {"min": 8},
        }
    )


class _Clock:
    """Processor seconds of a run before and behind the begin of its trace."""

    def __init__(self) -> None:
        self._made_s = time.process_time()
        self._began_s = self._made_s

    def passed(self, simulated_s: float) -> None:
        if simulated_s == 0.0:
            self._began_s = time.process_time()

    def start_s(self) -> float:
        return self._began_s - self._made_s

    def trace_s(self) -> float:
        return time.process_time() - self._began_s


def measure_paper(report: Report, policy: str) -> None:
    """Measure trace-a on the paper's cluster."""
    case = workload("trace-a")
    simulate(case, POLICIES[policy])
    began_s = time.perf_counter()
    outcome = simulate(case, POLICIES[policy])
    seconds = time.perf_counter() - began_s
    report.line("paper", policy=policy, seconds=round(seconds, 3), events=outcome.events)
    report.at_most("seconds of 128 GPUs for 8 weeks, one policy", seconds, 5.0)


def measure_large(report: Report, scale: Scale) -> None:
    """Measure the large course once for each kind of failure, and its memory."""
    for kind, bound_s in (("losses", 0.1), ("lighter", 0.01)):
        case = large(scale, losses=kind == "losses", lighter=kind == "lighter")
        number = sum(each.change != "up" for each in case.trace.occurrences)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log.db"
            log, clock = EventLog(f"sqlite:///{path}"), _Clock()
            outcome = simulate(case, POLICIES[scale.policy], log=log, costs=False, progress=clock.passed)
            seconds = clock.trace_s()
            log.close()
            each_s = seconds / max(number, 1)
            report.line(
                "large",
                kind=kind,
                **scale._asdict(),
                failures=number,
                start_s=round(clock.start_s(), 2),
                trace_s=round(seconds, 2),
                events=outcome.events,
                transitions=outcome.transitions,
                log_bytes=path.stat().st_size,
            )
        report.at_most(f"mean seconds of one of the {kind}", round(each_s, 5), bound_s)
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.at_most("most bytes of memory", rss_bytes, MOST_BYTES)


MOST_BYTES = 2 * 1024**3
"""The planner's state and tables of 2,048 nodes and 64 tasks are about 400 MB, compiled code included; nothing may grow
with the number of failures but the points of WAF and the times of recoveries, some hundred bytes each."""


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--weeks", type=float, default=8.0)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="unicron")
    options = parser.parse_args()
    scale = Scale(options.nodes, options.tasks, options.weeks, options.policy)

    def measure(report: Report) -> None:
        measure_paper(report, scale.policy)
        measure_large(report, scale)

    return run(measure)


if __name__ == "__main__":
    sys.exit(main())
