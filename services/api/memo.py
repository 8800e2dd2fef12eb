"""What requests have found at the newest position of the log, so that the next request need not look again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_MOST = 64
"""Things that are kept: a report of costs has eight, and clients ask for a few different ones by turns."""


class Memo:
    """Things found at one position of the log, all of which are forgotten with the next; safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # to find one thing may take another
        self._head = ""
        self._known: dict[Hashable, Any] = {}

    def get(self, head: str, key: Hashable, find: Callable[[], T]) -> T:
        """Return what was found at a position, or what ``find`` returns, which no one may change.

        Args:
            head: the hash of the record at the position.
            key: what is asked for.
            find: looks for it.
        """
        with self._lock:
            if self._head != head or len(self._known) >= _MOST:
                self._head, self._known = head, {}
            if key not in self._known:
                self._known[key] = find()
            found: T = self._known[key]
            return found
