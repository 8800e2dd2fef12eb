"""An agent with real processes on a real bus."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.agent.agent import Agent
from services.agent.succession.inheritance import Inheritance
from shared.bus.connection import Bus
from shared.messages.signals import HEARTBEATS, SIGNALS
from shared.settings.model import Settings
from tests.agent.kit import HERE, WORKERS, Driver, Ear, supervision


@pytest.fixture
async def ear(bus: Bus) -> Ear:
    """The detector's end of the bus."""
    found = Ear(bus)
    await bus.answer(SIGNALS.subject, lambda _, data: found.signal(data))
    await bus.listen(HEARTBEATS.subject, found.heartbeat)
    return found


@pytest.fixture
async def inherited(settings: Settings) -> AsyncIterator[Inheritance]:
    """What the agents of one supervisor share."""
    async with supervision(settings) as shared:
        yield shared


@pytest.fixture
async def agent(settings: Settings, bus: Bus, inherited: Inheritance) -> AsyncIterator[Agent]:
    """A running agent."""
    started = Agent(settings, bus, HERE, WORKERS, "0" * 32, inherited)
    try:
        await started.start()
        yield started
    finally:
        await started.stop()


@pytest.fixture
def driver(bus: Bus, agent: Agent) -> Driver:
    """The transition service's end of the bus."""
    return Driver(bus)
