"""Reads that many ask for at the same time: one is made after the other, each for all who have asked before it began.

No answer is older than its question, and who is alone never waits for others. A signal waits until its service has
folded what the log has by then (``shared.service.runner``): if the end of the log were read for each, the reads of a
thousand signals would wait for threads, and the append that answers one behind them. Viewers of the live page ask for
the same lists (``services.api.route_parts.joined_answers``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SharedRead(Generic[Value]):
    """A read of one thing."""

    def __init__(self) -> None:
        self._running: asyncio.Task[Value] | None = None
        self._next: asyncio.Task[Value] | None = None
        """Begins when the running one has ended."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for a read that has not begun."""
        return self._next is not None

    async def value(self, read: Callable[[], Awaitable[Value]]) -> Value:
        """Return the answer of a read that begins after this call; raise what it raises.

        Args:
            read: makes it, unless somebody waits for one that has not begun.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._begin(self._running, read), name="shared read")
            self._next.add_done_callback(_retrieve)
        return await asyncio.shield(self._next)  # others may wait for it when this one waits no more

    async def _begin(self, running: asyncio.Task[Value] | None, read: Callable[[], Awaitable[Value]]) -> Value:
        if running is not None:
            await asyncio.wait({running})
        self._running, self._next = self._next, None
        return await read()


def _retrieve(task: asyncio.Task[Value]) -> None:
    """Take note of an error, which is raised where it is waited for; perhaps nobody does any more."""
    if not task.cancelled():
        task.exception()
