"""The clock of shells that judge time-outs."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta


class SteadyClock:
    """UTC that never jumps: the wall clock's time at construction plus the monotonic clock's time since then.

    Time-outs that are judged by this clock are not affected when the wall clock is stepped (by NTP or an operator).
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
