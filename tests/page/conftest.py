from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.api.routers.health import SERVICES
from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.messages.health import HEALTH, Health
from shared.settings.model import Settings
from tests.api.kit import Server, serving
from tests.page.kit import write_story


@pytest.fixture
async def parts(bus: Bus) -> dict[str, Health]:
    """What the other services of the control plane answer: that they work, and have handled all events."""
    answers = {name: Health(ready=True, handled=2**31) for name in SERVICES}
    for name in SERVICES:

        async def answer(_: None, name: str = name) -> Health:
            return answers[name]

        await bus.serve(HEALTH, answer, name)
    return answers


@pytest.fixture
async def cluster(settings: Settings, bus: Bus, journal: Journal, parts: dict[str, Health]) -> AsyncIterator[Server]:
    """A gateway over the story of the page's tests, beside services that answer how they are."""
    write_story(settings.run_dir / "log.db")
    async with serving(settings.model_copy(update={"input_dirs": str(settings.run_dir)}), bus, journal) as server:
        yield server
