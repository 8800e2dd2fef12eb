"""When a process that has ended is started again: at once, after longer and longer pauses, or no more. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

HANDED_OVER = 80
"""Exit status of an agent that leaves its node's processes to a successor. The statuses of errors are 1 to 6
(``shared.errors``), those of sysexits.h 64 to 78."""

MAX_RESTARTS, WINDOW_S = 5, 60.0
"""A process that ends more often than this within the window has a fault that a restart does not mend. The number is
the same as for the services of ``unicron up``."""

FIRST_PAUSE_S = 1.0
"""The first restart within the window comes at once, the second after this time, each further one after twice as long:
1 + 2 + 4 + 8 s, so that what is short for some seconds ends no node."""


@dataclass
class Restarts:
    """The restarts of one process."""

    _at_s: deque[float] = field(default_factory=deque)

    def pause_s(self, now_s: float) -> float | None:
        """Return how long to wait before the process is started again; None if it has ended too often.

        Args:
            now_s: when it has ended, on any steady clock.
        """
        while self._at_s and now_s - self._at_s[0] > WINDOW_S:
            self._at_s.popleft()
        recent = len(self._at_s)
        if recent == MAX_RESTARTS:
            return None
        self._at_s.append(now_s)
        return FIRST_PAUSE_S * 2 ** (recent - 1) if recent else 0.0
