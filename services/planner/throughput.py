"""T(t, x): achieved aggregate model FLOP/s of a task on x workers, modelled and then corrected by measurement.

The correction is a power of 1.1 and moves only when a measurement leaves its hysteresis, so that the noise of step
times changes no plan and throws away no look-ahead.
"""

from __future__ import annotations

from shared.tasks import TaskSpec

CORRECTION_BASE = 1.1
"""Corrections are powers of this: steps of 10%, finer than the hysteresis, coarser than the noise of a median."""

MAX_EXPONENT = 300
"""1.1 ** 300 is 2.6e12: further from the model than any measurement can honestly be."""

REDUCTION_MICRO_BATCHES = 0.1
"""Cost of the gradient all-reduce over many replicas, in micro-batches: it moves each parameter twice (ring
all-reduce, 2 (d-1)/d of the gradient) where one micro-batch uses each of them 6 times for every token; a tenth is what
short sequences on slow links show. The measured correction takes up the rest."""


def flop_per_step(spec: TaskSpec) -> float:
    """Return the model FLOP of one update."""
    return spec.model.flop_per_sample() * spec.batch.global_


def largest_count(spec: TaskSpec, workers: int) -> int:
    """Return the most workers the task can use: of those there are, its maximum, one micro-batch for each replica."""
    replica = spec.tensor * spec.pipeline
    limit = workers if spec.workers.max is None else min(workers, spec.workers.max)
    return min(limit // replica, spec.batch.micro_batches) * replica


def modelled_flop_per_s(spec: TaskSpec, workers: int, worker_flop_per_s: float) -> float:
    """Return T(t, x) before correction; 0 where no layout fits.

    A step lasts as long as its most loaded replica, ceil(M / d) micro-batches, and the gradient all-reduce, which
    grows as (d-1)/d (ring). M micro-batches in that time on x = tensor * pipeline * d workers:
    T = worker_flop_per_s * tensor * pipeline * M / (ceil(M / d) + 0.1 (d-1)/d).
    """
    replica = spec.tensor * spec.pipeline
    if workers <= 0 or workers % replica or workers > largest_count(spec, workers):
        return 0.0
    data = workers // replica
    total = spec.batch.micro_batches
    most_loaded = -(-total // data)
    cost = most_loaded + REDUCTION_MICRO_BATCHES * (data - 1) / data
    return worker_flop_per_s * replica * total / cost


def throughput_table(spec: TaskSpec, workers: int, worker_flop_per_s: float, exponent: int = 0) -> dict[int, float]:
    """Return T(t, x), FLOP/s, for each x that has a layout, up to ``workers``."""
    replica = spec.tensor * spec.pipeline
    factor = correction(exponent)
    counts = range(replica, largest_count(spec, workers) + 1, replica)
    return {x: modelled_flop_per_s(spec, x, worker_flop_per_s) * factor for x in counts}


def correction(exponent: int) -> float:
    """Return 1.1 ** exponent by repeated multiplication (no library power: it may differ between machines)."""
    factor = 1.0
    for _ in range(abs(exponent)):
        factor = factor * CORRECTION_BASE
    return factor if exponent >= 0 else 1.0 / factor


def corrected_exponent(present: int | None, ratio: float, hysteresis: float) -> int:
    """Return the exponent for a measured / modelled ratio.

    ``present`` stays while the ratio is within ``hysteresis`` (relative) of what it says; None: nothing measured yet.
    """
    if present is not None:
        relative = ratio / correction(present)
        if 1.0 - hysteresis <= relative <= 1.0 + hysteresis:
            return present
    return _nearest_exponent(ratio)


def _nearest_exponent(ratio: float) -> int:
    """Return the exponent of the power of 1.1 nearest to the ratio (by relative distance)."""
    if ratio < 1.0:
        return -_nearest_exponent(1.0 / ratio) if ratio > 0.0 else -MAX_EXPONENT
    exponent = 0
    below = 1.0
    while exponent < MAX_EXPONENT and below * CORRECTION_BASE <= ratio:
        below = below * CORRECTION_BASE
        exponent += 1
    nearer_above = ratio / below > below * CORRECTION_BASE / ratio
    return exponent + 1 if nearer_above and exponent < MAX_EXPONENT else exponent
