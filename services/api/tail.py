"""The newest events as streams send them: read and encoded once, whatever the number of streams.

A ``Tail`` belongs to the event loop. Streams that are further behind than it remembers read the log by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from services.api.event_items import event_json
from services.api.feed import Feed
from shared.errors import UnicronError
from shared.log.journal import Journal

MOST_EVENTS = 1000
"""Events that are read, and sent, at once."""

MOST_BYTES = 4_000_000
"""Of what is remembered: seconds of a thousand events each, so that only a stream that takes nothing meanwhile is
further behind."""


class _Event(NamedTuple):
    """An event as streams send it. ``brief``: without its data."""

    whole: bytes
    brief: bytes


class Tail:
    """The newest events of a log as server-sent events.

    Args:
        journal: of the log.
        feed: streams send what it has folded: a client that asks on an event sees what the event has changed.
    """

    def __init__(self, journal: Journal, feed: Feed) -> None:
        self._journal, self._feed = journal, feed
        self._reading = asyncio.Lock()
        self._events: list[_Event] = []
        self._bytes = 0
        self._last = 0
        """Position of the newest of ``_events``, which have no gap."""

    async def after(self, position: int, *, brief: bool = False) -> tuple[bytes, int]:
        """Return the next events behind a position, and the position of the last of them; none: ``b""``.

        Args:
            position: up to which the stream has the log.
            brief: whether it sends positions and types alone.

        Raises:
            Unavailable: the log does not answer.
            UnicronError: an event cannot be read.
        """
        if position >= self._feed.position:
            return b"", position
        async with self._reading:
            if position >= self._last:
                await self._extend(position)
            behind = self._last - position
            if 0 <= behind <= len(self._events):
                first = len(self._events) - behind
                return _joined(self._events[first : first + MOST_EVENTS], position, brief)
        found = await asyncio.to_thread(self._encoded, position, self._feed.position)
        return _joined(found, position, brief)

    async def _extend(self, position: int) -> None:
        """Read what is behind a position, which is at the end of what is known, or beyond it."""
        if position > self._last:
            self._events, self._bytes, self._last = [], 0, position
        found = await asyncio.to_thread(self._encoded, position, self._feed.position)
        self._events += found
        self._bytes += sum(len(event.whole) for event in found)
        self._last += len(found)
        oldest = 0
        while self._bytes > MOST_BYTES and oldest < len(self._events):
            self._bytes -= len(self._events[oldest].whole)
            oldest += 1
        del self._events[:oldest]

    def _encoded(self, after: int, until: int) -> Sequence[_Event]:
        if after >= until:
            return []
        found: list[_Event] = []
        for row in self._journal.log.page(after=after, limit=min(MOST_EVENTS, until - after)):
            place = f"id: {row.position}\nevent: {row.type}\ndata: "
            try:
                found.append(_Event(f"{place}{event_json(row)}\n\n".encode(), f"{place}{{}}\n\n".encode()))
            except UnicronError:
                if found:
                    break  # those before it are sent first
                raise
        return found


def _joined(events: Sequence[_Event], position: int, brief: bool) -> tuple[bytes, int]:
    return b"".join(event.brief if brief else event.whole for event in events), position + len(events)
