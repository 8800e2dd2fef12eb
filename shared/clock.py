"""The clock of a process: UTC that never jumps back, whatever becomes of the machine's wall clock.

Every process has one, ``PROCESS_CLOCK``, from which come the times of events, of time-outs and of messages.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

TOLERANCE_S = 1.0
"""A clock is set only if it differs by more than this. Clocks that NTP keeps differ by milliseconds; a smaller
difference spoils no duration that anyone reads, and a clock that moved all the time would spoil some."""


class SteadyClock:
    """UTC that follows the monotonic clock: the wall clock's time at construction plus the time since then.

    A wall clock that is stepped (by NTP or an operator) changes nothing. It jumps only by ``adopt`` and ``not_before``.
    """

    def __init__(self) -> None:
        self._origin = datetime.now(UTC)
        self._start_s = time.monotonic()

    def seconds(self) -> float:
        """Return the time of the monotonic clock, in seconds since an arbitrary moment."""
        return time.monotonic()

    def now(self) -> datetime:
        """Return the time in UTC."""
        return self._origin + timedelta(seconds=time.monotonic() - self._start_s)

    def adopt(self, at: datetime) -> float:
        """Take ``at`` for the present time if it differs by more than ``TOLERANCE_S``; return by how much, in seconds.

        A process that starts calls this (``shared.messages.common_time``), before it has used this clock.
        """
        difference = at - self.now()
        if abs(difference.total_seconds()) <= TOLERANCE_S:
            return 0.0
        self._origin += difference
        return difference.total_seconds()

    def not_before(self, at: datetime) -> None:
        """Go forward to ``at`` if that is later than now by more than ``TOLERANCE_S``.

        Services call this with the times of the log, which another service may have written by another clock.
        """
        if at > self.now():
            self.adopt(at)


PROCESS_CLOCK = SteadyClock()
"""The clock of this process."""
