"""Measure what the `cpu` profile states: one thread's matrix rate and memory bandwidth.

    OMP_NUM_THREADS=1 python -m benchmarks.measure_cpu

The numbers can replace the profile's: ``measured(profile("cpu"), peak_flop_per_s=..., ...)``. There are no bounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.report import Report, run

REPEATS = 20


def fastest_s(work: Callable[[], object]) -> float:
    """Return the shortest of several runs, in seconds: other programs use the machine too."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(report: Report) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    side, elements = 512, 16_000_000
    a, b = torch.randn(side, side), torch.randn(side, side)
    source, target = torch.randn(elements), torch.empty(elements)
    flop_per_s = 2.0 * side**3 / fastest_s(lambda: torch.mm(a, b))
    bytes_per_s = 8.0 * elements / fastest_s(lambda: target.copy_(source))
    report.line("cpu", peak_flop_per_s=flop_per_s, memory_bytes_per_s=bytes_per_s)


if __name__ == "__main__":
    sys.exit(run(measure))
