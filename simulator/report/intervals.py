"""Confidence intervals of means (Student's t).

scipy, which has the same quantiles, is 100 MB and no dependency of the control plane; a test compares with it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean, and the interval that contains the mean of all seeds with probability ``CONFIDENCE``."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with its 95% interval: mean +- t(n - 1) s / sqrt(n).

    The spread of a single value is unknown: the interval of one value is the value itself.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, mean, mean)
    half = student_t(len(values) - 1) * statistics.stdev(values, mean) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t for which |T| <= t has this probability, where T has Student's distribution.

    Bisection of the distribution as a finite series in theta = atan(t / sqrt(degrees)) (Abramowitz and Stegun,
    "Handbook of Mathematical Functions", 26.7.3 and 26.7.4).

    Args:
        degrees: degrees of freedom, at least 1.
        confidence: the probability, above 0 and below 1.
    """
    low, high = 0.0, math.pi / 2
    while (theta := (low + high) / 2) not in (low, high):
        if _probability(theta, degrees) < confidence:
            low = theta
        else:
            high = theta
    return math.sqrt(degrees) * math.tan(theta)


def _probability(theta: float, degrees: int) -> float:
    """Return P(|T| <= sqrt(degrees) tan(theta))."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):  # the powers of the cosine, up to degrees - 2
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
