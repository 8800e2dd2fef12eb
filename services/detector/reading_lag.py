"""How far the detector is behind with what nodes send."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

BEHIND_S = 0.5
"""Longest round of reading that is no lag. A longer one has every fault found that much later: two heartbeats of an
agent pass."""

_SAID_EVERY_S = 60.0
"""Pause between two lines about the lag. Chosen: an overload that lasts fills no log, and whoever looks sees it within
a minute."""


class ReadingLag:
    """The newest round in which heartbeats were read.

    Attributes:
        seconds: how long the round took; the tick after it judges the moment at which the round began.
        skipped: heartbeats, since the start, that were not read since a newer one of their node had come.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.skipped = 0
        self._said_at_s = -_SAID_EVERY_S
        self._said = 0

    def note(self, seconds: float, skipped: int, at_s: float) -> None:
        """Take note of a round, and say once a minute that the detector is behind. ``at_s``: a monotonic time."""
        self.seconds, self.skipped = seconds, skipped
        if seconds > BEHIND_S and at_s - self._said_at_s >= _SAID_EVERY_S:
            logger.warning(
                "behind: the newest heartbeats of all nodes take %.1f s to read, and %d older ones were skipped; "
                "faults are found so much later, and no node is judged by what was not read",
                seconds,
                skipped - self._said,
            )
            self._said_at_s, self._said = at_s, skipped
