"""How long something lasts, by its age: nodes until they are lost, and lost nodes until they are back.

Ages are divided into bins. In each, the rate at which what has lasted so long ends is constant:

    rate of a bin = (ends in it + prior ends) / (time observed in it + prior time)

This is the Gamma-Poisson estimate, bin by bin; what has not ended yet counts with its time alone (censoring).

*Repairs* (``rates_per_s``). The prior is one duration of mean m from the Lomax distribution of shape 2, whose survival
(m / (m + t))**2 needs no more than the four operations: broad, as repairs are (minutes to days), and still of mean m.
In a bin it is worth the ends and the time that one such duration has there in the mean. So a bin that nothing is known
of keeps the prior's rate, and a single end in a bin that the prior finds improbable counts for much: after one outage
of ten minutes, the next is expected to be over in some tens of minutes, and if it is not, to last as the prior says.

*Lives of nodes* (``loss_rates_per_s``). The prior is one loss in each bin and the mean time between losses that all
nodes show: a Gamma distribution of shape 1. So two losses within a minute after a node has joined treble its rate
there, and say nothing of minutes; only losses by the dozen do. Shape 1 is the exponential distribution of rates over
nodes, which is as uneven as published clusters are: Kokolis et al. (HPCA 2025) find most nodes alike, and a few in a
hundred ("lemons") with many times the failures of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

EDGES_S = (0.0, 60.0, 240.0, 960.0, 3840.0, 15360.0, 61440.0, 245760.0, 983040.0)
"""Where bins begin, seconds: a restart of an agent takes less than a minute, a repair up to weeks. A factor of 4 tells
minutes from hours and hours from days, and a few durations fill a bin."""


class Observed(NamedTuple):
    """Durations of one kind. ``ends``: how many ended, by bin of ``EDGES_S``. ``spent_s``: time spent in each bin."""

    ends: tuple[int, ...] = (0,) * len(EDGES_S)
    spent_s: tuple[float, ...] = (0.0,) * len(EDGES_S)

    def with_one(self, duration_s: float, *, ended: bool) -> Observed:
        """Return the observations with one more: a duration, or one that has not ended yet."""
        duration_s = max(0.0, duration_s)
        spent = [
            total + max(0.0, min(duration_s, until) - since)
            for total, since, until in zip(self.spent_s, EDGES_S, (*EDGES_S[1:], duration_s), strict=True)
        ]
        if not ended:
            return Observed(self.ends, tuple(spent))
        bin_ = bin_of(duration_s)
        return Observed((*self.ends[:bin_], self.ends[bin_] + 1, *self.ends[bin_ + 1 :]), tuple(spent))


PRIOR_LOSSES = 1.0
"""Losses that the prior is worth in each bin of a node's age, as that of all nodes is worth one (``node_mtbf_s``)."""

NOTHING = Observed()
"""Before the first observation."""


def bin_of(age_s: float) -> int:
    """Return the number of the bin that an age belongs to."""
    return max(0, sum(edge <= age_s for edge in EDGES_S) - 1)


def rates_per_s(observed: Observed, prior_mean_s: float) -> tuple[float, ...]:
    """Return the rate of ends in each bin, per second; see the module.

    The prior's mean time in a bin from a to b is the integral of its survival, m**2 (1 / (m + a) - 1 / (m + b)).
    """
    m = prior_mean_s
    survival = [(m / (m + edge)) * (m / (m + edge)) for edge in EDGES_S]
    beyond = [m * m / (m + edge) for edge in EDGES_S]
    ends = [a - b for a, b in pairwise((*survival, 0.0))]
    times = [a - b for a, b in pairwise((*beyond, 0.0))]
    return tuple(
        (known + prior) / (spent + time)
        for known, spent, prior, time in zip(observed.ends, observed.spent_s, ends, times, strict=True)
    )


def loss_rates_per_s(observed: Observed, mean_s: float) -> tuple[float, ...]:
    """Return the rate at which a node is lost in each bin of its age, per second; see the module.

    Args:
        observed: how long the node was usable each time.
        mean_s: mean time between losses of a node, by what all nodes show.
    """
    return tuple(
        (ends + PRIOR_LOSSES) / (spent_s + PRIOR_LOSSES * mean_s)
        for ends, spent_s in zip(observed.ends, observed.spent_s, strict=True)
    )


def remaining_s(rates: Sequence[float], age_s: float, hazard: float) -> float:
    """Return how much longer what has this age lasts.

    Args:
        rates: of ends, by bin (``rates_per_s``).
        age_s: how long it has lasted, seconds.
        hazard: a draw of the exponential distribution of mean 1: it ends when its rate, summed over time, reaches it.
    """
    passed_s = 0.0
    for bin_ in range(bin_of(age_s), len(EDGES_S) - 1):
        width_s = EDGES_S[bin_ + 1] - (age_s + passed_s)
        if hazard <= rates[bin_] * width_s:
            return passed_s + hazard / rates[bin_]
        hazard -= rates[bin_] * width_s
        passed_s += width_s
    return passed_s + hazard / rates[-1]
