"""The newest progress of a rank, of which the agent needs no more than the newest: when it is sent, and with what.

The agent passes progress on with its heartbeats, every 0.25 s, so of several reports in between only the newest counts,
and of the steps that have ended only the last one. Each report in between would cost a write, and a wake-up of the
agent.
"""

from __future__ import annotations

import math

from unicron.protocol.messages import Progress, encode

INSIDE_A_STEP = frozenset({"compute", "reduce", "update", "ended"})
"""Phases that may be kept back. The beginning of a step is reported at once, and with it the end of the step before: so
the agent knows the step of a process that is killed, or that holds the interpreter's lock for ever."""


class NewestProgress:
    """Progress that is sent, or kept back for a while. It is not safe for threads: the connection's lock guards it."""

    def __init__(self, interval_s: float) -> None:
        """Args: interval_s: for how long progress may be kept back."""
        self._interval_s = interval_s
        self._ended: Progress | None = None
        """The progress behind the last step that has ended, until it is sent."""
        self._newest: Progress | None = None
        self.is_kept_back = False
        """Whether there is progress that has not been sent."""
        self._sent_s = -math.inf
        """When progress was sent last, on the monotonic clock."""

    def note(self, progress: Progress) -> None:
        """Take progress in place of the one before."""
        if progress.phase == "ended":
            self._ended = progress
        self._newest, self.is_kept_back = progress, True

    def is_due(self, now_s: float) -> bool:
        """Return whether the newest progress is not to be kept back (any longer)."""
        newest = self._newest
        return newest is not None and (newest.phase not in INSIDE_A_STEP or self.remaining_s(now_s) <= 0.0)

    def remaining_s(self, now_s: float) -> float:
        """Return for how long progress may still be kept back; not positive: it is due."""
        return self._sent_s + self._interval_s - now_s

    def take(self, now_s: float) -> bytes:
        """Return what was kept back, as lines of the protocol; from here on it counts as sent."""
        if not self.is_kept_back:
            return b""
        return self.repeat(now_s)

    def repeat(self, now_s: float) -> bytes:
        """Return what ``take`` returns, and the newest progress also if it was sent before: to another agent."""
        reports = (self._ended if self._ended is not self._newest else None, self._newest)
        self._ended, self.is_kept_back, self._sent_s = None, False, now_s
        return b"".join(encode(report) for report in reports if report is not None)
