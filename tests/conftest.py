"""Fixtures of all tests: a real nats-server, a real log, each test's own; a PostgreSQL server where one can be had."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.settings.model import Settings
from tests.examples import load_profile
from tests.nats_server import OpenServer
from tests.postgres import PostgresServer, empty_schema, find_binaries

GIVEN_URL = "UNICRON_TEST_POSTGRES_URL"

load_profile()


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[OpenServer]:
    """A running nats-server on a free port, its store in the test's folder."""
    async with OpenServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(nats: OpenServer) -> AsyncIterator[Bus]:
    """A connection to the server."""
    connection = await Bus.connect(nats.url, credential=nats.credential, name="test")
    yield connection
    await connection.close()


@pytest.fixture
def settings(tmp_path: Path, nats: OpenServer) -> Settings:
    """Settings of a stack in the test's folder."""
    return Settings(node="n0", run_dir=tmp_path, nats_url=nats.url, nats_credential=nats.credential_file, port=0)


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
