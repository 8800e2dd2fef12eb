"""An agent with real processes on a real bus."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.agent.agent import Agent
from shared.bus import Bus
from shared.settings import Settings
from shared.signals import HEARTBEATS, SIGNALS
from tests.agent.kit import HERE, STAND_IN, Driver, Ear


@pytest.fixture
async def ear(bus: Bus) -> Ear:
    """The detector's end of the bus."""
    found = Ear(bus)
    await bus.serve(SIGNALS, found.signal)
    await bus.subscribe(f"{HEARTBEATS}.*", found.heartbeat)
    return found


@pytest.fixture
async def agent(settings: Settings, bus: Bus) -> AsyncIterator[Agent]:
    """A running agent."""
    started = Agent(settings, bus, HERE, "0" * 32, command=STAND_IN)
    try:
        await started.start()
        yield started
    finally:
        await started.stop()


@pytest.fixture
def driver(bus: Bus, agent: Agent) -> Driver:
    """The transition service's end of the bus."""
    return Driver(bus)
