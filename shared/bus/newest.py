"""Messages of which each makes the one before obsolete, such as heartbeats: the newest of each sender waits to be read.

A reader that is behind thus never reads what is out of date, and knows of each message when it came: a queue in front
of it would make everything old, and the sender look silent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Generic, TypeVar

from shared.bus.dropped import DroppedMessages
from shared.bus.endpoints import Endpoint
from shared.errors import Undecodable
from shared.model import Clock

Request = TypeVar("Request")


class Newest(Generic[Request]):
    """Keeps what has come and was not read. ``replaced``: how many were never read, since a newer one had come.

    Args:
        endpoint: the endpoint of the messages, whose subjects name their senders.
        dropped: counts and logs what is not readable.
        clock: gives the times at which messages come.
    """

    def __init__(self, endpoint: Endpoint[Request, None], dropped: DroppedMessages, clock: Clock) -> None:
        self._endpoint, self._dropped, self._clock = endpoint, dropped, clock
        self._waiting: dict[str, tuple[bytes, datetime]] = {}
        self._came = asyncio.Event()
        self.replaced = 0

    async def put(self, subject: str, data: bytes) -> None:
        """Take a message without decoding it, so that this takes no longer than reading it from the connection."""
        self.replaced += subject in self._waiting
        self._waiting[subject] = (data, self._clock())
        self._came.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until a message waits to be read, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._came.wait()

    def take(self, most: int | None = None) -> Iterator[tuple[Request, datetime]]:
        """Return the messages that wait at this moment, each with the time at which it came.

        Each is decoded when it is asked for; messages that come meanwhile wait for the next call. ``most``: return so
        many at most, of the senders that have waited longest; None: all.
        """
        if most is None or most >= len(self._waiting):
            waiting, self._waiting = self._waiting, {}
            self._came.clear()
        else:
            waiting = {subject: self._waiting.pop(subject) for subject in list(islice(self._waiting, most))}
        return self._read(waiting)

    def _read(self, waiting: dict[str, tuple[bytes, datetime]]) -> Iterator[tuple[Request, datetime]]:
        for subject, (data, came_at) in waiting.items():
            try:
                yield self._endpoint.read(subject, data), came_at
            except Undecodable as err:
                self._dropped.note(self._endpoint.source(subject), err)
