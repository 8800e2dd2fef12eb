"""Measure what the `cpu` profile states: one thread's matrix rate and memory bandwidth.

    OMP_NUM_THREADS=1 python -m benchmarks.measure_cpu

The numbers it prints can replace the profile's: ``measured(profile("cpu"), peak_flop_per_s=..., ...)``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

REPEATS = 20


def fastest_s(work: Callable[[], object]) -> float:
    """Shortest of several runs: others use the machine too."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    side, elements = 512, 16_000_000
    a, b = torch.randn(side, side), torch.randn(side, side)
    source, target = torch.randn(elements), torch.empty(elements)
    flop_per_s = 2.0 * side**3 / fastest_s(lambda: torch.mm(a, b))
    bytes_per_s = 8.0 * elements / fastest_s(lambda: target.copy_(source))
    print(json.dumps({"peak_flop_per_s": flop_per_s, "memory_bytes_per_s": bytes_per_s}))


if __name__ == "__main__":
    main()
