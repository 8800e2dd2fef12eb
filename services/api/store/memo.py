"""What requests have found in the newest state of the projections, so that the next request need not look again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_MOST = 64
"""Things that are kept: a report of costs has eight, and clients ask for a few different ones by turns."""


class Memo:
    """Things found in one state, all of which are forgotten with the next; safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # to find one thing may take another
        self._state: Hashable = None
        self._known: dict[Hashable, Any] = {}

    def get(self, state: Hashable, key: Hashable, find: Callable[[], T]) -> T:
        """Return what was found in a state, or what ``find`` returns, which no one may change.

        Args:
            state: of the projections: the log's position, and how far time is settled.
            key: what is asked for.
            find: looks for it.
        """
        with self._lock:
            if self._state != state or len(self._known) >= _MOST:
                self._state, self._known = state, {}
            if key not in self._known:
                self._known[key] = find()
            found: T = self._known[key]
            return found
