"""How late the heartbeats of one node come: an accrual estimate of what its silence means. Pure.

An accrual failure detector gives no verdict but a degree, phi, which grows with the silence (Hayashibara,
Défago, Yared, Katayama: The phi accrual failure detector, SRDS 2004)::

    phi(silence) = -log10 P(a heartbeat comes later than this)

In that paper P is that of a normal distribution. The delays of real heartbeats have heavier tails, since a process
waits for a CPU and a lost TCP segment is repeated after 0.2 s, 0.4 s and so on. So P is here

* for delays that have been seen: their frequency in the recent past, (1 + how many were longer) / (1 + all);
* beyond, an exponential tail above the 90% quantile ``u``, whose mean is the mean excess over ``u`` (peaks over
  threshold with shape 0: Davison and Smith, Models for exceedances over high thresholds, JRSS B 1990). A heavier tail
  has a larger mean excess, and one far outlier already widens it.

What is estimated is by how much a heartbeat is later than its agent has promised (``Heartbeat.interval_s``), and not
the interval itself: agents also send heartbeats between two regular ones, which would narrow it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right

WINDOW = 256
"""Number of delays that are kept, about a minute of heartbeats: an old usage of a node is forgotten as soon."""

WARM_UP = 40
"""Number of delays before the estimate counts, 10 s of heartbeats: four exceedances, whose mean varies by a half."""

TAIL_FRACTION = 0.1
"""Part of the delays from which the tail is estimated: the common choice for peaks over threshold, 25 of a window."""

GRAIN_S = 0.005
"""Least mean of the tail. Shorter delays are the grain of an event loop, and nothing follows from their variation."""

BURST_FRACTION = 0.5
"""Heartbeats that come within this part of the promised interval say nothing of how late one may be: they were sent
out of turn, or have waited in the bus behind a late one and come together with it."""

ABSENCE_INTERVALS = 20
"""Promised intervals from which a gap was an absence (of the node, of its link) and no delay: 5 s, beyond any bound."""

REFRESH = 8
"""Number of delays after which the tail is estimated anew, 2 s of heartbeats. A delay that is the longest of all counts
at once."""


class Arrivals:
    """The recent delays of one node's heartbeats.

    Attributes:
        count: how many have been noted since the start.
    """

    __slots__ = ("_above", "_fresh", "_interval_s", "_late_s", "_mean_excess_s", "_sorted", "_threshold_s", "count")

    def __init__(self) -> None:
        self._late_s = array("d")
        self._interval_s = 0.0
        self._fresh = 0
        self._sorted = array("d")
        self._threshold_s, self._mean_excess_s, self._above = 0.0, GRAIN_S, 1.0
        self.count = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arrivals) and (self.count, self._late_s) == (other.count, other._late_s)

    def note(self, gap_s: float, interval_s: float) -> None:
        """Take the time between two heartbeats.

        Args:
            gap_s: seconds.
            interval_s: the time within which the second heartbeat was promised.
        """
        self._interval_s = interval_s
        if not BURST_FRACTION * interval_s <= gap_s <= ABSENCE_INTERVALS * interval_s:
            return
        late_s = max(0.0, gap_s - interval_s)
        if len(self._late_s) < WINDOW:
            self._late_s.append(late_s)
        else:
            self._late_s[self.count % WINDOW] = late_s
        self.count += 1
        self._fresh -= 1
        if self._sorted and late_s > self._sorted[-1]:
            self._fresh = 0

    @property
    def warm(self) -> bool:
        """Whether enough heartbeats have come for an estimate."""
        return self.count >= WARM_UP

    @property
    def samples(self) -> int:
        """Number of delays from which the estimate is made."""
        return len(self._late_s)

    @property
    def longest_s(self) -> float:
        """The longest delay of the recent past, seconds."""
        self._estimate()
        return self._sorted[-1] if self._sorted else 0.0

    @property
    def median_s(self) -> float:
        """The median delay of the recent past, seconds."""
        self._estimate()
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0

    def phi(self, silence_s: float) -> float:
        """Return phi after a silence; 0 while the next heartbeat is not overdue, or none is known.

        Args:
            silence_s: since the newest heartbeat.
        """
        late_s = silence_s - self._interval_s
        if late_s <= 0.0 or not self._late_s:
            return 0.0
        self._estimate()
        longer = len(self._sorted) - bisect_right(self._sorted, late_s)
        seen = (1 + longer) / (1 + len(self._sorted))
        if late_s <= self._threshold_s:
            return -math.log10(seen)
        tail_phi = -math.log10(self._above) + (late_s - self._threshold_s) / self._mean_excess_s / math.log(10.0)
        return min(tail_phi, -math.log10(seen)) if longer else max(tail_phi, 0.0)

    def silence_s(self, phi: float) -> float:
        """Return the silence from which ``phi`` is at least this much, seconds.

        Args:
            phi: larger than that of a delay that has been seen, log10(1 + ``WINDOW``) = 2.4.
        """
        self._estimate()
        beyond_s = self._mean_excess_s * (phi * math.log(10.0) + math.log(self._above))
        late_s = self._threshold_s + max(0.0, beyond_s)
        return self._interval_s + max(late_s, self._sorted[-1] if self._sorted else 0.0)

    def _estimate(self) -> None:
        """Estimate the tail, if enough delays have come since it was estimated last."""
        if self._fresh > 0 or not self._late_s:
            return
        self._fresh = REFRESH
        self._sorted = array("d", sorted(self._late_s))
        count = len(self._sorted)
        tail = min(count, max(1, round(TAIL_FRACTION * count)))
        self._threshold_s = self._sorted[count - tail - 1] if tail < count else 0.0
        excess_s = sum(late_s - self._threshold_s for late_s in self._sorted[count - tail :]) / tail
        self._mean_excess_s = max(excess_s, GRAIN_S)
        self._above = (1 + tail) / (1 + count)
