"""A follower that collects the records it receives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from shared.events.union import Recorded
from shared.log.journal import Journal
from tests.condition import until


class Collector:
    def __init__(self) -> None:
        self.records: list[Recorded] = []

    @property
    def positions(self) -> list[int]:
        return [record.position for record in self.records]

    async def handle(self, record: Recorded) -> None:
        self.records.append(record)

    async def until(self, position: int) -> None:
        """Wait until the record at ``position`` has been received."""
        await until(lambda: self.records and self.positions[-1] >= position, seen=lambda: self.positions)


class Several:
    """A follower of several records at once. Calls return once ``go`` is set."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.calls: list[list[int]] = []
        """Positions of the records of each call."""
        self.go = asyncio.Event()

    async def _handle(self, records: Sequence[Recorded]) -> None:
        self.calls.append([record.position for record in records])
        await self.go.wait()

    async def until(self, position: int) -> None:
        """Wait until the record at ``position`` has been received."""
        await until(lambda: self.calls and self.calls[-1][-1] >= position, seen=lambda: self.calls)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow for the length of the block."""
        task = asyncio.create_task(self._journal.follow_several(self._handle, consumer="test", after=0))
        try:
            yield
            if task.done():
                task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def following(journal: Journal, *, consumer: str = "test", after: int = 0) -> AsyncIterator[Collector]:
    """Follow for the length of the block; an exception of the follower is raised here."""
    collector = Collector()
    task = asyncio.create_task(journal.follow(collector.handle, consumer=consumer, after=after))
    try:
        yield collector
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
