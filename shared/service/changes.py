"""Waiting for a condition on the shared state of one event loop, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes the tasks that wait for a condition on some state, whenever that state changes."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}
        """The tasks that wait, in the order in which they began, which is also that in which they are woken."""

    def notify(self) -> None:
        """Have every waiting task evaluate its predicate again. The owner of the state calls this after each change."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Return when ``predicate()`` is true. An exception of the predicate ends the wait and is raised."""
        while not predicate():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)
