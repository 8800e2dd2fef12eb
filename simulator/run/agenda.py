"""The agenda: what is to happen in simulated time, in order.

A plain heap (``heapq``) and no process-based simulator such as simpy: most of what is planned here is superseded by a
later fault, and an entry that is cancelled costs nothing, where a process would have to be interrupted and cleaned up.
Entries of the same moment happen in the order in which they were made, so that a run is deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Second 0 of every trace, as the log has it: a fixed time, so that equal runs have equal logs. A midnight of UTC, so
that days of the cost report are days of the trace."""

_DECIMALS = 6
"""The decimals of a second that count: the log has microseconds, and a run must not depend on more than its log can
say."""


def time_of(at_s: float) -> datetime:
    """Return a simulated second as the log has it."""
    return START + timedelta(seconds=at_s)


@dataclass(order=True, slots=True)
class Entry:
    """Something that is to happen. ``number``: of entries, in the order in which they were made."""

    at_s: float
    number: int
    action: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Have it not happen."""
        self.action = None


class Agenda:
    """Simulated time. ``now_s``: the present moment, seconds since the start of the trace."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[Entry] = []
        self._number = 0

    @property
    def now(self) -> datetime:
        """The present moment as the log has it."""
        return time_of(self.now_s)

    def at(self, at_s: float, action: Callable[[], None]) -> Entry:
        """Have ``action`` called at a time, or now if that has passed; return the entry, which can be cancelled."""
        self._number += 1
        entry = Entry(max(round(at_s, _DECIMALS), self.now_s), self._number, action)
        heapq.heappush(self._heap, entry)
        return entry

    def run(self, until_s: float, passed: Callable[[float], None]) -> None:
        """Let time pass up to ``until_s``; ``passed`` is called with the time before each entry that happens."""
        while self._heap and self._heap[0].at_s <= until_s:
            entry = heapq.heappop(self._heap)
            if entry.action is None:
                continue
            self.now_s = entry.at_s
            passed(entry.at_s)
            entry.action()
        self.now_s = until_s
