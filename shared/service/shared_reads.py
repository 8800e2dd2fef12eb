"""Reads that many ask for at the same time: one is made after the other, each for all who have asked before it began.

A signal waits until its service has folded what the log has by then (``shared.service.runner``). If the end of the log
were read for each, the reads of a thousand signals would wait for threads, and the append that answers one behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class SharedRead(Generic[Value]):
    """A read whose answer is never older than the question.

    Args:
        read: makes one read.
    """

    def __init__(self, read: Callable[[], Awaitable[Value]]) -> None:
        self._read = read
        self._running: asyncio.Task[Value] | None = None
        self._next: asyncio.Task[Value] | None = None
        """Begins when the running one has ended."""

    async def value(self) -> Value:
        """Return the answer of a read that begins after this call; raise what the read raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._begin(self._running), name="shared read")
        return await asyncio.shield(self._next)

    async def _begin(self, running: asyncio.Task[Value] | None) -> Value:
        if running is not None:
            await asyncio.wait({running})
        self._running, self._next = self._next, None
        return await self._read()
