"""What ``benchmarks.evaluation`` runs: policies over seeds, and random clusters with their logs checked."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from services.planner.replay.replay import Replayer
from shared.planning import compiled
from simulator.outcome import Outcome
from simulator.policies import POLICIES, SOLVES
from simulator.report.intervals import Interval, mean_interval
from simulator.report.summary import ORACLE
from simulator.runs import Run, WorkloadOf, make, make_all
from simulator.workloads.random_workloads import random_workload

ROUNDING = 1e-9
"""Relative: sums of some thousand terms in another order."""

SUM_TOLERANCE = 1e-6
"""Relative: times in the log are whole microseconds, intervals are some seconds."""


K = TypeVar("K")


def over_seeds(workload_of: WorkloadOf, policy: str, seeds: int, parameters: Mapping[str, float]) -> list[Run]:
    """Return the runs of a policy with so many seeds; costs are not accounted for. ``parameters``: that differ."""
    return [Run(workload_of, policy, seed, parameters, costs=False) for seed in range(seeds)]


def make_groups(groups: Mapping[K, Sequence[Run]], jobs: int) -> dict[K, list[Outcome]]:
    """Make the runs of all groups; return the outcomes of each, in its order.

    All at once: each process works out the throughput tables of a model and a cluster once, which takes longer than a
    run.
    """
    outcomes = iter(make_all([run for runs in groups.values() for run in runs], jobs))
    return {name: [next(outcomes) for _ in runs] for name, runs in groups.items()}


def mean_waf(outcomes: Sequence[Outcome]) -> float:
    """Return the mean accumulated WAF, FLOP."""
    return math.fsum(each.accumulated_waf_flop for each in outcomes) / len(outcomes)


@dataclass(frozen=True)
class Gain:
    """By what one policy is above another, relative to the other, paired by seed."""

    mean: Interval
    worst: float

    def fields(self) -> dict[str, Any]:
        """Return what a benchmark's line says of it."""
        return {"gain": self.mean.mean, "interval": [self.mean.low, self.mean.high], "worst": self.worst}


def gain(ours: Sequence[Outcome], others: Sequence[Outcome]) -> Gain:
    """Return the gain of the first over the second, seed by seed."""
    relative = [
        mine.accumulated_waf_flop / other.accumulated_waf_flop - 1.0 for mine, other in zip(ours, others, strict=True)
    ]
    return Gain(mean_interval(relative), min(relative))


@dataclass(frozen=True)
class Checked:
    """One policy on one random cluster and trace: what must hold, and the values of it.

    ``to_oracle``: accumulated WAF over the oracle's. ``sum_error``: of the kinds of time, relative to the allocated
    time. ``verified``: whether the log passes; ``problems``: what is wrong with it.
    """

    seed: int
    policy: str
    to_oracle: float
    sum_error: float
    verified: bool
    problems: list[str]
    events: int


def check_random(seeds: Sequence[int], jobs: int) -> list[Checked]:
    """Run every policy on the random workload of each seed, with a log that is verified afterwards."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=compiled.load) as pool:
        return [checked for of_seed in pool.map(_check_seed, seeds) for checked in of_seed]


def _check_seed(seed: int) -> list[Checked]:
    bound = make(Run(random_workload, ORACLE, seed)).accumulated_waf_flop
    with tempfile.TemporaryDirectory() as folder:
        return [_check(seed, policy, bound, Path(folder, f"{policy}.db")) for policy in POLICIES]


def _check(seed: int, policy: str, bound: float, log: Path) -> Checked:
    outcome = make(Run(random_workload, policy, seed, log=log))
    report = Replayer.of_file(log).verify(policies=SOLVES)
    counted_s, allocated_s = math.fsum(outcome.worker_s.values()), outcome.allocated_worker_s
    done = outcome.accumulated_waf_flop
    return Checked(
        seed=seed,
        policy=policy,
        to_oracle=done / bound if bound else (math.inf if done else 1.0),
        sum_error=abs(counted_s - allocated_s) / allocated_s if allocated_s else counted_s,
        verified=report.ok,
        problems=[str(each) for each in report.mismatches[:3]],
        events=outcome.events,
    )
