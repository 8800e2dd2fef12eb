"""Fixtures of all tests: a real nats-server, which most tests of a process share; a real log, each test's own; a
PostgreSQL server where one can be had.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.settings.model import Settings
from tests.examples import load_profile
from tests.nats_server import OpenServer, SharedServer
from tests.postgres import PostgresServer, empty_schema, find_binaries

GIVEN_URL = "UNICRON_TEST_POSTGRES_URL"

load_profile()


def pytest_collection_finish() -> None:
    """Have the collector of garbage leave alone what was imported, which would take it half a second each time."""
    gc.freeze()


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[OpenServer]:
    """A nats-server of the test's own, its store in the test's folder: for tests that stop it, or change its keys."""
    async with OpenServer(tmp_path / "nats") as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedServer]:
    """The nats-server of the other tests of this process."""
    async with SharedServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def cleared(shared_server: SharedServer) -> SharedServer:
    """The shared server, without what the test before has left."""
    await shared_server.clear()
    return shared_server


@pytest.fixture
def bus_server(request: pytest.FixtureRequest) -> OpenServer:
    """The server of ``bus`` and ``settings``: the test's own where anything of the test asks for ``nats``."""
    found: OpenServer = request.getfixturevalue("nats" if "nats" in request.fixturenames else "cleared")
    return found


@pytest.fixture
async def bus(bus_server: OpenServer) -> AsyncIterator[Bus]:
    """A connection to the server."""
    connection = await Bus.connect(bus_server.url, credential=bus_server.credential, name="test")
    yield connection
    await connection.close()


@pytest.fixture
def settings(tmp_path: Path, bus_server: OpenServer) -> Settings:
    """Settings of a stack in the test's folder."""
    credential = bus_server.credential_file
    return Settings(node="n0", run_dir=tmp_path, nats_url=bus_server.url, nats_credential=credential, port=0)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    """An empty log on SQLite, where ``settings`` expects it."""
    event_log = EventLog(f"sqlite:///{tmp_path / 'log.db'}")
    yield event_log
    event_log.close()


@pytest.fixture
async def journal(log: EventLog, bus: Bus) -> AsyncIterator[Journal]:
    """The log with its relay running."""
    async with Journal(log, bus) as opened:
        yield opened


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a server: the one given in the environment, or an own one on a Unix socket; skips without either."""
    if url := os.environ.get(GIVEN_URL):
        yield url
        return
    if find_binaries() is None:
        pytest.skip(f"no PostgreSQL: {GIVEN_URL} is not set and no server binaries are installed")
    with PostgresServer() as server:
        yield server.url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """URL of an empty schema."""
    with empty_schema(postgres_server) as url:
        yield url
