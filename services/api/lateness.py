"""Lateness: how far behind the newest record the changes of a batch reach. Pure.

A fault is detected some time after it has occurred, and changes what every worker's time since then was used for.
"""

from __future__ import annotations

import math
from collections import deque

_BATCHES = 32
"""Batches that are remembered: where much changes, those of some five seconds."""

_SHARE = 0.9
"""Share of these batches that is usual. The others are so few that to settle again what they change costs less than
every request would pay for a longer open time."""


class Lateness:
    """The lateness of the newest batches."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=_BATCHES)
        self._recorded_s = -math.inf
        """When the last record of the batch before had been appended."""

    def note(self, from_s: float, recorded_s: float) -> None:
        """Take note of a batch.

        Args:
            from_s: the earliest time that the batch has changed, seconds since the epoch; infinite: none.
            recorded_s: when its last record was appended.
        """
        self._late_s.append(max(self._recorded_s - from_s, 0.0))
        self._recorded_s = recorded_s

    def usual_s(self) -> float:
        """Return the lateness, in seconds, that nine of ten batches do not exceed; at least one batch was noted."""
        return sorted(self._late_s)[math.ceil(_SHARE * len(self._late_s)) - 1]
