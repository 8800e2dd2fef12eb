"""The newest events as streams send them: read and encoded once, whatever the number of streams.

A ``Tail`` belongs to the event loop. Streams that are further behind than it remembers read the log by themselves.
What streams send of the newest events without their data, the feed knows: they wait for no reading.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from services.api.event_items import event_json
from services.api.feed import Feed
from shared.errors import UnicronError
from shared.log.journal import Journal
from shared.log.schema import StoredRow

MOST_EVENTS = 1000
"""Events that are read, and sent, at once."""

MOST_BYTES = 8_000_000
"""Of what is remembered: seconds of a thousand events each, so that only a stream that takes nothing meanwhile is
further behind."""


class _Event:
    """An event as streams send it."""

    def __init__(self, row: StoredRow) -> None:
        self._row = row
        self.type = row.type
        self._whole = b""
        self.brief = _framed(row.position, row.type, "{}")
        """Without its data."""
        self.size_bytes = 2 * sum(len(str(cell)) for cell in row)
        """About what is kept: the row, and the event with its data."""

    def whole(self) -> bytes:
        """Return the event with its data, encoded when a stream first asks for it: live pages never do.

        Raises:
            UnicronError: the event cannot be read.
        """
        if not self._whole:
            self._whole = _framed(self._row.position, self.type, event_json(self._row))
        return self._whole


def _framed(position: int, type_: str, data: str) -> bytes:
    return f"id: {position}\nevent: {type_}\ndata: {data}\n\n".encode()


class _Newest(NamedTuple):
    """The newest events without their data, as streams of the types send them that have the log up to ``after``."""

    after: int
    until: int
    types: AbstractSet[str]
    sent: bytes


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
        self._newest = _Newest(0, 0, frozenset(), b"")

    async def after(
        self, position: int, *, brief: bool = False, types: AbstractSet[str] = frozenset()
    ) -> tuple[bytes, int]:
        """Return the next events behind a position, and the position up to which they are; none: ``b""``.

        Args:
            position: up to which the stream has the log.
            brief: whether it sends positions and types alone.
            types: of the events that it sends; empty: all.

        Raises:
            Unavailable: the log does not answer.
            UnicronError: an event cannot be read.
        """
        if position >= self._feed.position:
            return b"", position
        if brief and self._feed.position - position <= len(self._feed.newest):
            newest = self._of_feed(position, types)
            return newest.sent, newest.until
        async with self._reading:
            if position >= self._last:
                await self._extend(position)
            behind = self._last - position
            known = 0 <= behind <= len(self._events)
            found = self._events[-behind:][:MOST_EVENTS] if known and behind else []
        if not known:
            found = await asyncio.to_thread(self._read, position, self._feed.position)
        encoded = _brief(found, types) if brief else await asyncio.to_thread(_whole, found, types)
        return b"".join(encoded), position + len(encoded)

    def _of_feed(self, position: int, types: AbstractSet[str]) -> _Newest:
        """Return what the feed knows behind a position; streams mostly ask for the same."""
        until = min(self._feed.position, position + MOST_EVENTS)
        if self._newest[:3] != (position, until, types):
            newest, behind = self._feed.newest, self._feed.position - position
            first = len(newest) - behind
            named = enumerate(itertools.islice(newest, first, first + until - position), position + 1)
            sent = b"".join(_framed(at, type_, "{}") for at, type_ in named if not types or type_ in types)
            self._newest = _Newest(position, until, types, sent)
        return self._newest

    async def _extend(self, position: int) -> None:
        """Read what is behind a position, which is at the end of what is known, or beyond it."""
        if position > self._last:
            self._events, self._bytes, self._last = [], 0, position
        found = await asyncio.to_thread(self._read, position, self._feed.position)
        self._events += found
        self._bytes += sum(event.size_bytes for event in found)
        self._last += len(found)
        oldest = 0
        while self._bytes > MOST_BYTES and oldest < len(self._events):
            self._bytes -= self._events[oldest].size_bytes
            oldest += 1
        del self._events[:oldest]

    def _read(self, after: int, until: int) -> list[_Event]:
        limit = min(MOST_EVENTS, until - after)
        return [_Event(row) for row in self._journal.log.page(after=after, limit=limit)] if limit > 0 else []


def _brief(events: Iterable[_Event], types: AbstractSet[str]) -> list[bytes]:
    """Return events without their data; ``b""`` for one that is of none of the types."""
    return [event.brief if not types or event.type in types else b"" for event in events]


def _whole(events: Iterable[_Event], types: AbstractSet[str]) -> list[bytes]:
    """Return events with their data, up to the first that cannot be read; ``b""`` for one that is of none of the types.

    Raises:
        UnicronError: the first of all cannot be read.
    """
    found: list[bytes] = []
    try:
        for event in events:
            found.append(event.whole() if not types or event.type in types else b"")
    except UnicronError:
        if not found:
            raise
    return found
