"""A detector on a real bus and a real log, beside an agent with real processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from services.detector.main import DetectorService
from shared.bus.connection import Bus
from shared.bus.dropped import DroppedMessages
from shared.events.union import Event
from shared.log.journal import Journal
from shared.service.frame import Context
from shared.settings.model import Settings
from tests.agent.conftest import agent, driver, inherited
from tests.agent.kit import WAIT_S
from tests.condition import until

__all__ = ["agent", "driver", "inherited", "monitor", "strict_monitor"]

STALL_S = 4.0
"""Longer than a busy machine stalls a process."""


def patient(settings: Settings) -> Settings:
    """Return settings with which no node is lost that is there, however long its machine stalls it."""
    return settings.model_copy(update={"node_timeout_s": WAIT_S})


@dataclass
class Awaited(Context):
    """``began``: set when the service is ready."""

    began: asyncio.Event = field(default_factory=asyncio.Event)

    def ready(self) -> None:
        super().ready()
        self.began.set()


class LogWatch:
    """Waits for events in the log."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    async def until(self, found: Callable[[list[Event]], bool]) -> list[Event]:
        """Wait until the log has events of which a condition is true; return all events."""
        events: list[Event] = []

        async def read() -> bool:
            events[:] = [r.event for r in await asyncio.to_thread(self.journal.log.read)]
            return found(events)

        await until(read, seen=lambda: events)
        return events


@contextlib.asynccontextmanager
async def watching(
    settings: Settings,
    bus: Bus,
    journal: Journal,
    counters: dict[str, int] | None = None,
    registry: CollectorRegistry | None = None,
) -> AsyncIterator[LogWatch]:
    """A running detector."""
    context = Awaited(settings, bus, journal, asyncio.Event(), "detector")
    if registry is not None:
        context.registry = registry
    bus.dropped = DroppedMessages(counters if counters is not None else {})
    running = asyncio.create_task(DetectorService(context).run())
    waiting = asyncio.create_task(context.began.wait())
    await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_COMPLETED)
    assert context.began.is_set(), running.exception()
    try:
        yield LogWatch(journal)
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.fixture
async def monitor(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[LogWatch]:
    """A running detector that finds no node silent while a test lasts."""
    async with watching(patient(settings), bus, journal) as watch:
        yield watch


@pytest.fixture
async def strict_monitor(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[LogWatch]:
    """A running detector that finds silent nodes."""
    async with watching(settings.model_copy(update={"node_timeout_s": STALL_S}), bus, journal) as watch:
        yield watch
