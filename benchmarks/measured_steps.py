"""Measure how the own compute times of real ranks vary: the parameters of ``benchmarks/simulated_steps.py``.

    OMP_NUM_THREADS=1 python -m benchmarks.measured_steps [--ranks 4] [--steps 1500]

Ranks of a data-parallel task (gloo) compute forward and backward passes of a transformer layer and reduce its
gradients. Each measures its own time as ``unicron.training.step`` does. A line ``variation`` has, of the logarithm of a
rank's time over the median of the others': the robust standard deviation; the correlation of neighbouring steps; the
part of steps that are in slow phases (above two robust standard deviations, smoothed over five steps), their mean
length and typical and largest factor; the part of single steps above a factor of 2. There are no bounds: a busy machine
varies more.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import socket
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.report import Report, run
from unicron.training.compute_time import ComputeTimer

WIDTH, LENGTH, MICRO_BATCHES, WARM_UP = 64, 64, 2, 20
"""A layer whose passes take some 5 ms on one core: long beside the clock, short enough for many steps."""


def _rank(rank: int, ranks: int, port: int, steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    timer, times = ComputeTimer(), []
    for step in range(steps):
        timer.begin(step, alone=True)
        for _ in range(MICRO_BATCHES):
            layer(torch.randn(4, LENGTH, WIDTH)).square().mean().backward()
        timer.end()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None
        times.append(timer.result_s())
    results.put((rank, times))
    dist.destroy_process_group()


def variation(times_s: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return the parameters of times [rank, step]."""
    logs = np.log(times_s)
    ratios = np.array([own - np.median(np.delete(logs, rank, 0), axis=0) for rank, own in enumerate(logs)])
    ratios -= np.median(ratios, axis=1, keepdims=True)
    sigma = float(1.4826 * np.median(np.abs(ratios)))
    bounded = np.clip(ratios, -4 * sigma, 4 * sigma)
    correlation = float(np.mean([np.corrcoef(row[:-1], row[1:])[0, 1] for row in bounded]))
    smooth = np.array([np.convolve(row, np.full(5, 0.2), mode="same") for row in bounded])
    phases = [
        (len(steps), float(np.exp(np.median(steps))))
        for row, level in zip(ratios, smooth, strict=True)
        for slow, group in itertools.groupby(zip(row, level, strict=True), key=lambda both: both[1] > 2 * sigma)
        if slow and len(steps := [own for own, _ in group]) > 1
    ]
    lengths, factors = [length for length, _ in phases] or [0], [factor for _, factor in phases] or [1.0]
    common = np.median(logs, axis=0)
    return {
        "sigma": sigma,
        "correlation": correlation,
        "slow_part": sum(lengths) / ratios.size,
        "slow_steps_mean": float(np.mean(lengths)),
        "slow_steps_max": float(max(lengths)),
        "slow_factor_p50": float(np.median(factors)),
        "slow_factor_max": float(max(factors)),
        "outliers": float(np.mean(ratios > np.log(2.0))),
        "common_sigma": float(1.4826 * np.median(np.abs(common - np.median(common)))),
        "step_s_p50": float(np.median(times_s)),
    }


def measure(ranks: int, steps: int, report: Report) -> None:
    """Measure and print."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, ranks, port, steps, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    times = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    found = np.array([times[rank][WARM_UP:] for rank in range(ranks)])
    report.line("variation", ranks=ranks, steps=steps, **{k: round(v, 4) for k, v in variation(found).items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    sys.exit(run(functools.partial(measure, options.ranks, options.steps)))
