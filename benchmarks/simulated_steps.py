"""Generated step times of a large task through the detector's straggler test: false alarms, and the delay of real ones.

    python -m benchmarks.simulated_steps [--ranks 1000] [--hours 24] [--seed 1] [--courses 200] [--stage-ranks 4]

The times go through ``services.detector.state.stragglers.PeerGroup``, the code that the detector runs. One core does a
day of 1,000 ranks within ten minutes. ``STEP_S`` is a step of real training: the times within it matter only as ratios.

A rank's time for a micro-batch is a product of (``Variation``):

* what is common to all ranks: log-normal noise, and phases in which all are slow;
* the rank's own log-normal noise, correlated from step to step (an autoregressive process of order 1);
* slow phases of the rank (a two-state Markov chain), each with a factor of its own;
* single steps that take a multiple: a stall of data, a snapshot, a process that is stopped.

``MEASURED`` has the parameters. ``OMP_NUM_THREADS=1 python -m benchmarks.measured_steps --ranks 4 --steps 1500`` found
on two cores that other processes kept busy: a standard deviation of 0.055 and a correlation of 0.11; 0.08% of the steps
in slow phases of 2.5 steps on average, 3 at most, and factors up to 1.14; 0.02% of outliers; 0.043 in common.
Phases and outliers here are five times as frequent, phases are longer and as deep as the deepest that was found. With
phases of up to 1.2 (in place of 1.15) a day of 1,000 ranks has one false alarm, which is within one in 10,000
rank-hours.

``--stage-ranks`` has the ranks compared in pipeline stages of so many, as where a task has tensor and pipeline
parallelism; with 1 in pipelines of ``STAGES`` stages, of one rank each. By default all are in one stage.

Lines: ``noise`` with the parameters; ``false-alarms`` with rank-hours and alarms, bound 0; ``straggler`` with the delay
in steps of a slowdown of 1.3 that begins at some step of some rank, bound 20 at p99 (of two ranks ``LATEST_OF_TWO``),
and the wrong ranks, bound 0.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import Report, run
from services.detector.state.stragglers import PeerGroup

STEP_S = 10.0
"""Duration of a step: those of large models take 5 to 20 s (Megatron, SC'21, table 1: 145 billion parameters at a
global batch of 2,304 on 1,536 devices: about 15 s)."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How own compute times vary.

    Attributes:
        sigma: standard deviation of a rank's own logarithm.
        correlation: of neighbouring steps' own noise.
        slow_part: part of the steps that a rank spends in slow phases.
        slow_steps: mean length of a slow phase, in steps.
        slow_factor: largest factor of a slow phase; each draws its own between 1 and this, on the logarithmic scale.
        outliers: part of the steps that take 2 to 10 times as long.
        common_sigma: standard deviation of the logarithm that all ranks share.
        common_factor: factor of the phases in which all are slow; they are as frequent and as long as a rank's own.
    """

    sigma: float
    correlation: float
    slow_part: float
    slow_steps: float
    slow_factor: float
    outliers: float
    common_sigma: float
    common_factor: float = 2.0


MEASURED = Variation(
    sigma=0.056,
    correlation=0.12,
    slow_part=0.004,
    slow_steps=4.0,
    slow_factor=1.15,
    outliers=0.001,
    common_sigma=0.1,
)


STAGES = 8
"""Of a pipeline whose stages have one rank each."""

LATEST, LATEST_OF_TWO = 20, 25
"""Bounds of the steps until a slowdown of 1.3 is found, p99. Of two ranks, the one peer is as noisy as the rank
itself."""


class FalseAlarms(NamedTuple):
    """What came of a course in which nothing is wrong."""

    ranks: int
    steps: int
    rank_hours: float
    alarms: int


class StragglerDelay(NamedTuple):
    """What came of one straggler. ``steps``: until it was found, None if it was not; ``wrong``: other ranks found."""

    steps: int | None
    wrong: int
    slowdown: float | None


def step_times(ranks: int, seed: int, variation: Variation = MEASURED) -> Iterator[np.ndarray[Any, Any]]:
    """Yield, for each step, the own compute times of all ranks for a micro-batch, without end."""
    draw = np.random.default_rng(seed)
    leave = 1.0 / variation.slow_steps
    enter = leave * variation.slow_part / (1.0 - variation.slow_part)
    fresh = variation.sigma * np.sqrt(1.0 - variation.correlation**2)
    own = draw.normal(0.0, variation.sigma, ranks)
    slow = draw.random(ranks + 1) < variation.slow_part  # the last place is that of all ranks together
    factors = draw.random(ranks) * np.log(variation.slow_factor)
    while True:
        own = variation.correlation * own + draw.normal(0.0, fresh, ranks)
        begins = ~slow & (draw.random(ranks + 1) < enter)
        slow = (slow & (draw.random(ranks + 1) >= leave)) | begins
        factors = np.where(begins[:-1], draw.random(ranks) * np.log(variation.slow_factor), factors)
        logs = own + np.where(slow[:-1], factors, 0.0)
        logs += draw.normal(0.0, variation.common_sigma) + (np.log(variation.common_factor) if slow[-1] else 0.0)
        stalled = draw.random(ranks) < variation.outliers
        logs += np.where(stalled, np.log(2.0) + draw.random(ranks) * np.log(5.0), 0.0)
        yield np.exp(logs)


def false_alarms(
    ranks: int, hours: float, seed: int, variation: Variation = MEASURED, *, stage_ranks: int = 0
) -> FalseAlarms:
    """Return how many workers the detector takes for slow in a course in which none is.

    Args:
        ranks: their number.
        hours: the length of the course.
        seed: of the course.
        variation: of the times.
        stage_ranks: number of ranks in a pipeline stage; 0: all are in one.
    """
    workers = [f"n{rank}/0" for rank in range(ranks)]
    size = STAGES if stage_ranks == 1 else stage_ranks or ranks
    groups = [(slice(first, first + size), PeerGroup(unequal=stage_ranks == 1)) for first in range(0, ranks, size)]
    steps = round(hours * 3600 / STEP_S)
    alarms = 0
    for step, times_s in zip(range(steps), step_times(ranks, seed, variation), strict=False):
        of_workers = list(zip(workers, times_s.tolist(), strict=True))
        alarms += sum(len(group.take(step, dict(of_workers[part]), {})) for part, group in groups)
    return FalseAlarms(ranks, steps, ranks * steps * STEP_S / 3600, alarms)


def straggler_delay(
    ranks: int, seed: int, slowdown: float = 1.3, variation: Variation = MEASURED, *, within: int = 200
) -> StragglerDelay:
    """Return when one rank is found that slows down at some step, after a time in which all were well.

    Args:
        ranks: of the task.
        seed: of the course; it also selects the rank.
        slowdown: the factor on the rank's time.
        variation: of the times.
        within: steps after which the search ends.
    """
    group, workers = PeerGroup(), [f"n{rank}/0" for rank in range(ranks)]
    victim, begins = seed % ranks, 100 + seed % 7
    wrong = 0
    for step, times_s in zip(range(begins + within), step_times(ranks, seed, variation), strict=False):
        if step >= begins:
            times_s[victim] *= slowdown
        for change in group.take(step, dict(zip(workers, times_s.tolist(), strict=True)), {}):
            if change.worker == workers[victim] and step >= begins:
                return StragglerDelay(step - begins + 1, wrong, change.slowdown)
            wrong += 1
    return StragglerDelay(None, wrong, None)


def measure(ranks: int, hours: float, seed: int, courses: int, stage_ranks: int, report: Report) -> None:
    """Run the courses and print. Two seeds have no course in common."""
    report.line("noise", step_s=STEP_S, **asdict(MEASURED))
    began_s = time.perf_counter()
    found = false_alarms(ranks, hours, seed, stage_ranks=stage_ranks)
    took = {"seed": seed, "stage_ranks": stage_ranks or ranks, "seconds": round(time.perf_counter() - began_s, 1)}
    report.line("false-alarms", **took, **found._asdict())
    report.at_most("false alarms", found.alarms, 0)
    for size in (2, 4, 8, 64):
        delays = [straggler_delay(size, seed * courses + course) for course in range(courses)]
        steps = sorted(delay.steps if delay.steps is not None else 10**9 for delay in delays)
        p50, p99 = steps[len(steps) // 2], steps[min(len(steps) - 1, int(0.99 * len(steps)))]
        report.line("straggler", ranks=size, slowdown=1.3, n=courses, p50_steps=p50, p99_steps=p99, max_steps=steps[-1])
        bound = LATEST_OF_TWO if size == 2 else LATEST
        report.at_most(f"steps until a straggler of {size} ranks is found, p99", p99, bound)
        report.at_most(f"wrong ranks of {size}", sum(delay.wrong for delay in delays), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--courses", type=int, default=200)
    parser.add_argument("--stage-ranks", type=int, default=0)
    o = parser.parse_args()
    sys.exit(run(functools.partial(measure, o.ranks, o.hours, o.seed, o.courses, o.stage_ranks)))
