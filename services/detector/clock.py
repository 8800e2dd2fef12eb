"""Time for the shells."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta


class SteadyClock:
    """UTC that never jumps: the wall clock's reading at construction plus what the monotonic clock counted since.

    Time-outs are judged on it, so a stepped wall clock (NTP, an operator) declares no node lost.
    """

    def __init__(self) -> None:
        self._origin = datetime.now(UTC)
        self._start_s = time.monotonic()

    def seconds(self) -> float:
        """Return seconds on the monotonic clock."""
        return time.monotonic()

    def now(self) -> datetime:
        """Return the time in UTC."""
        return self._origin + timedelta(seconds=time.monotonic() - self._start_s)
