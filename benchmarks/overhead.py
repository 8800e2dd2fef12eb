"""What this library costs beside stock Megatron: time and CPU-seconds of a step, and memory.

    .venv/bin/python -m benchmarks.overhead [--cases NAME ...] [--pairs 1500] [--seconds 70]

Two ranks on two cores train a GPT of 0.84 million parameters. Steps of stock Megatron (its schedule,
``finalize_model_grads``, its optimizer) and steps of this library's loop take turns in the same processes, each pair in
the other order, until the 95% intervals of the medians of the paired ratios are at most 0.02 wide and do not contain
the bound, or until the case's time is over: the 13 cases take at most 20 minutes. A case is a layout, a micro-batch,
and whether node agents and services run beside it; copies in memory and checkpoints are off. Bounds:

    without agent    wall time and CPU-seconds of the ranks <= 1.01 at 1,024 tokens a micro-batch, <= 1.05 at 128
    with agent       CPU-seconds of the ranks <= 1.02 and <= 1.07; then, while this library's steps run alone, agent
                     (with supervisor and fork server) <= 2% of a core, control plane (bus and services) <= 8%. The wall
                     time is reported: ranks and services share the cores.
    memory           largest resident memory of a rank at 100 million parameters, stock and ours in processes of their
                     own: <= 1.02, and 1/DP of the gradients more with overlapped communication

Exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import overhead_memory, overhead_stack
from benchmarks.intervals import median_interval
from benchmarks.overhead_model import Workload
from benchmarks.overhead_rank import Pair, Plan, ratios
from benchmarks.ranks import run_ranks
from benchmarks.report import Report, at_least, run

WIDTH = 0.02
"""Of the 95% interval: half of it is below the smaller margin that the bounds leave."""

MOST_S = 70
"""For the pairs of a case. With 15 s to start 12 such cases, the 20 s in which two of them have this library's steps
alone, and the minute and a half that memory takes, the whole takes at most 20 minutes."""

AGENT_CORES, CONTROL_PLANE_CORES = 0.02, 0.08
"""Required: processor time of a node's agent, and of bus and services together."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-overlap": {"distributed_optimizer": True, "overlap": True},
    "dp2-all-reduce-overlap": {"overlap": True},
    "tp2-sequence": {"tensor": 2, "sequence_parallel": True},
    "pp2-interleaved": {"pipeline": 2, "interleave": 2, "micro_batches": 4},
}
"""Name -> fields of the workload. A pipeline has more micro-batches: with two its stages would idle half the time."""

TOKENS: dict[str, dict[str, Any]] = {"128": {"samples": 1}, "1024": {"samples": 8}}
"""Tokens of a micro-batch -> fields of the workload."""


class Case(NamedTuple):
    """What is measured in one run of the ranks."""

    work: Workload
    with_agent: bool
    bound: float
    """Required of the ratio of CPU-seconds, and without agent of that of wall times."""

    @property
    def bounds(self) -> dict[str, float]:
        """The kinds of ratios that have the bound."""
        return dict.fromkeys(["CPU-seconds"] if self.with_agent else ["wall time", "CPU-seconds"], self.bound)


BOUNDS = {(False, "128"): 1.05, (False, "1024"): 1.01, (True, "128"): 1.07, (True, "1024"): 1.02}
"""With agent, tokens of a micro-batch -> bound."""


def cases() -> dict[str, Case]:
    """Return all cases by name: the layouts without an agent, and the first of them with one."""
    found = {}
    for with_agent, names in ((False, list(LAYOUTS)), (True, list(LAYOUTS)[:1])):
        for layout in names:
            for tokens, fields in TOKENS.items():
                name = f"{layout}-{tokens}-tokens" + ("-agent" if with_agent else "")
                work = Workload(**LAYOUTS[layout], **fields)
                found[name] = Case(work, with_agent, BOUNDS[with_agent, tokens])
    return found


MEMORY = "memory"
"""Name of the case that measures memory."""


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print."""
    known = cases()
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="unicron-overhead-") as temporary:
            folder = Path(temporary)
            if name == MEMORY:
                overhead_memory.measure(folder, report)
                continue
            case = known[name]
            plan = Plan(
                work=case.work, most_pairs=options.pairs, most_s=options.seconds, width=WIDTH, bounds=case.bounds
            )
            if case.with_agent:
                ranks = asyncio.run(overhead_stack.run_task(plan, folder))
            else:
                plan.write(folder)
                ranks = run_ranks("benchmarks.overhead_rank", [str(folder)], folder, case.work.ranks)
            figures(name, case, [rank["pairs"] for rank in ranks], report)
            if case.with_agent:
                shares(name, [rank["alone"] for rank in ranks], report)


def figures(name: str, case: Case, ranks: list[list[Pair]], report: Report) -> None:
    """Print what the pairs of steps show."""
    report.line(
        "case",
        name=name,
        pairs=len(ranks[0]),
        stock_step_s=round(statistics.median(pair["stock"]["s"] for pair in ranks[0]), 5),
        our_step_s=round(statistics.median(pair["ours"]["s"] for pair in ranks[0]), 5),
    )
    for kind, found in ratios(ranks).items():
        median, low, high = (round(value, 4) for value in median_interval(found))
        if kind not in case.bounds:
            report.line("ratio", name=f"{name}: ratio of {kind}", value=median, interval_95=[low, high])
            continue
        report.at_most(f"{name}: ratio of {kind}", median, case.bound, interval_95=[low, high])
        report.at_most(f"{name}: width of the interval of {kind}", round(high - low, 4), WIDTH)


def shares(name: str, alone: list[dict[str, Any]], report: Report) -> None:
    """Print how many cores the processes took while this library's steps ran alone."""
    first = alone[0]["cores"]
    report.line(
        "alone",
        name=name,
        steps=alone[0]["steps"],
        step_s=round(alone[0]["step_s"], 5),
        rank_cores=[round(rank["cores"]["rank"], 3) for rank in alone],
        cores={group: round(cores, 4) for group, cores in first.items() if group != "rank"},
    )
    agent, services = (
        sum(cores for group, cores in first.items() if group.startswith(kind))
        for kind in (overhead_stack.AGENT, overhead_stack.CONTROL_PLANE)
    )
    report.at_most(f"{name}: agent, cores", round(agent, 4), AGENT_CORES)
    report.at_most(f"{name}: control plane, cores", round(services, 4), CONTROL_PLANE_CORES)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=(__doc__ or "").splitlines()[0])
    names = [*cases(), MEMORY]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--pairs", type=at_least(50), default=1500, help="of steps, at most, for each case")
    parser.add_argument(
        "--seconds", type=at_least(1), default=MOST_S, help="for the pairs of each case, after which it ends"
    )
    options = parser.parse_args()
    return run(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
