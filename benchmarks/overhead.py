"""What a step of this library's loop costs beside a step of stock Megatron, in the same processes.

    .venv/bin/python -m benchmarks.overhead [--workloads NAME ...] [--pairs 1500]

Two data-parallel ranks without an agent train a GPT of 0.84 million parameters. Steps of stock Megatron (its schedule,
``finalize_model_grads``, its optimizer) and steps of this library's loop take turns, each pair in the other order,
until the 95% interval of the median of the paired ratios is at most 0.02 wide. Bounds for each workload:

    ratio of wall times and of CPU-seconds <= 1.05 at 128 tokens a micro-batch, <= 1.01 at 1,024
    width of the interval <= 0.02

Exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.intervals import median_interval
from benchmarks.overhead_rank import Workload
from benchmarks.ranks import run_ranks
from benchmarks.report import Report, at_least, run

RANKS = 2

WIDTH = 0.02
"""Of the 95% interval: half of it is below the smaller margin that the bounds leave."""


class Case(NamedTuple):
    """A workload, and how much more a step of this library's may cost."""

    bound: float
    fields: dict[str, Any]


CASES = {
    "dp2-128-tokens": Case(1.05, {"samples": 1}),
    "dp2-1024-tokens": Case(1.01, {"samples": 8}),
    "dp2-distributed-128-tokens": Case(1.05, {"samples": 1, "distributed_optimizer": True}),
    "dp2-distributed-1024-tokens": Case(1.01, {"samples": 8, "distributed_optimizer": True}),
}
SHAPE: dict[str, Any] = {"layers": 4, "hidden": 128, "heads": 4, "sequence_length": 128, "micro_batches": 2}


def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure and print."""
    for name in options.workloads:
        case = CASES[name]
        work = Workload(**SHAPE, **case.fields, most_pairs=options.pairs, width=WIDTH)
        with tempfile.TemporaryDirectory(prefix="unicron-overhead-") as folder:
            (Path(folder) / "workload.json").write_text(json.dumps(asdict(work)))
            ranks = run_ranks("benchmarks.overhead_rank", [folder], Path(folder), RANKS)
        figures(name, case.bound, ranks, report)


def figures(name: str, bound: float, ranks: list[Any], report: Report) -> None:
    """Print the figures of a workload: wall time of rank 0, CPU-seconds of all ranks."""
    wall = [pair["ours"]["s"] / pair["stock"]["s"] for pair in ranks[0]]
    cpu = [
        sum(pair["ours"]["cpu_s"] for pair in pairs) / sum(pair["stock"]["cpu_s"] for pair in pairs)
        for pairs in zip(*ranks, strict=True)
    ]
    report.line(
        "workload",
        name=name,
        pairs=len(wall),
        stock_step_s=round(statistics.median(pair["stock"]["s"] for pair in ranks[0]), 5),
        our_step_s=round(statistics.median(pair["ours"]["s"] for pair in ranks[0]), 5),
    )
    for kind, ratios in (("wall time", wall), ("CPU-seconds", cpu)):
        median, low, high = (round(value, 4) for value in median_interval(ratios))
        report.at_most(f"{name}: ratio of {kind}", median, bound, interval_95=[low, high])
        report.at_most(f"{name}: width of the interval of {kind}", round(high - low, 4), WIDTH)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pairs", type=at_least(50), default=1500, help="of steps, at most, for each workload")
    options = parser.parse_args()
    return run(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
