"""What requests have found in the newest state of the projections, so that the next request need not look again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_MOST = 128
"""Things that are kept: a report of costs has eight, the page asks for eight lists, and clients for a few others."""


@dataclass
class _Found:
    """A thing, once it was found. The first request that asks for it looks for it, and the others wait."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    things: list[Any] = field(default_factory=list)


class Memo:
    """Things found in one state, all of which are forgotten with the next; safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: Hashable = None
        self._known: dict[Hashable, _Found] = {}

    def get(self, state: Hashable, key: Hashable, find: Callable[[], T]) -> T:
        """Return what was found in a state, or what ``find`` returns, which no one may change.

        Args:
            state: of the projections: the log's position, and how far time is settled.
            key: what is asked for.
            find: looks for it; it may ask for other things, but for none of those that wait for this one.
        """
        with self._lock:
            if self._state != state or len(self._known) >= _MOST:
                self._state, self._known = state, {}
            found = self._known.setdefault(key, _Found())
        with found.lock:
            if not found.things:
                found.things.append(find())
            thing: T = found.things[0]
            return thing
