from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.bus import Bus
from shared.log.journal import Journal
from shared.settings import Settings
from tests.api.kit import Server, serving
from tests.page.kit import write_story


@pytest.fixture
async def cluster(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """A gateway over the story of the page's tests."""
    write_story(settings.run_dir / "log.db")
    async with serving(settings.model_copy(update={"input_dirs": str(settings.run_dir)}), bus, journal) as server:
        yield server
