from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus import Bus
from shared.journal import Journal
from shared.settings import Settings
from tests.api.kit import Server, Story, serving


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    """A history to be written."""
    story = Story(tmp_path / "story.db")
    yield story
    story.log.close()


@pytest.fixture
async def api(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over an empty log."""
    async with serving(settings, bus, journal) as server:
        yield server
