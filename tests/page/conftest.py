from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.messages.health import Health
from shared.settings.model import Settings
from tests.api.kit import Server, serving
from tests.page.kit import serve_parts, write_story


@pytest.fixture
async def parts(bus: Bus) -> dict[str, Health]:
    """What the other services of the control plane answer: that they work, and have handled all events."""
    return await serve_parts(bus)


@pytest.fixture
async def cluster(settings: Settings, bus: Bus, journal: Journal, parts: dict[str, Health]) -> AsyncIterator[Server]:
    """A gateway over the story of the page's tests, beside services that answer how they are."""
    write_story(settings.run_dir / "log.db")
    async with serving(settings.model_copy(update={"input_dirs": str(settings.run_dir)}), bus, journal) as server:
        yield server
