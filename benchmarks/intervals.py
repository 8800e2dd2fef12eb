"""Confidence intervals of measured ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_RATIOS = 2
"""Ratios that an interval takes: the spread of a single one is unknown."""

REASON = "the confidence interval takes the spread between at least two"
"""Why a benchmark refuses fewer repetitions."""


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of positive ratios, and its 95% confidence interval (Student's t, over logarithms).

    Raises:
        ValueError: there are fewer than ``LEAST_RATIOS``.
    """
    if len(ratios) < LEAST_RATIOS:
        raise ValueError(f"{len(ratios)} ratios have no confidence interval: {REASON}")
    import scipy.stats  # a second, which whoever measures nothing need not wait

    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    t = scipy.stats.t.ppf(0.975, len(logs) - 1)
    half = float(t) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and its 95% confidence interval (between order statistics: no assumption on the values).

    Raises:
        ValueError: there are too few values for an interval.
    """
    import scipy.stats

    found = scipy.stats.quantile_test(values, q=0.0, p=0.5).confidence_interval(0.95)
    low, high = float(found.low), float(found.high)
    if math.isnan(low) or math.isnan(high):
        raise ValueError(f"{len(values)} values have no 95% confidence interval of their median")
    return statistics.median(values), low, high
