from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.settings.model import Settings
from tests.api.kit import Server, Story, client_of, offline_gateway, serving
from tests.api.node_machines import NodeMachines, node_machines
from tests.postgres import PostgresServer, find_binaries


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    """A history to be written."""
    story = Story(tmp_path / "story.db")
    yield story
    story.log.close()


@pytest.fixture
async def offline(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway's application, without bus and log: for requests that are refused or use neither."""
    with offline_gateway(tmp_path) as gateway:
        async with client_of(gateway) as client:
            yield client


@pytest.fixture
async def api(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over an empty log."""
    # Tokens to submit may name what is in the run directory.
    allowed = settings.model_copy(update={"input_dirs": str(settings.run_dir)})
    async with serving(allowed, bus, journal) as server:
        yield server


@pytest.fixture
def machines(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeMachines]:
    """Node machines with run directories of their own; none serves yet."""
    with node_machines(bus, tmp_path / "machines", monkeypatch) as made:
        yield made


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A server that the test may kill."""
    if find_binaries() is None:
        pytest.skip("no server binaries of PostgreSQL are installed")
    with PostgresServer() as server:
        yield server
