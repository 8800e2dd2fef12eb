"""Waiting for a condition on shared state, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Whoever changes the state calls ``notify``; whoever waits gives a predicate on it."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Have every waiter look again."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Return when ``predicate()`` holds; what it raises ends the wait."""
        while not predicate():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
