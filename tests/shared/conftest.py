"""A PostgreSQL server for the tests of the log, where one can be had."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from tests.postgres import PostgresServer, find_binaries

GIVEN_URL = "UNICRON_TEST_POSTGRES_URL"


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
    with _schema(postgres_server) as url:
        yield url


@pytest.fixture
def other_postgres_url(postgres_server: str) -> Iterator[str]:
    """URL of another empty schema."""
    with _schema(postgres_server) as url:
        yield url


@contextmanager
def _schema(postgres_server: str) -> Iterator[str]:
    schema = f"test_{uuid.uuid4().hex}"
    dsn = make_url(postgres_server).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}".encode())
    yield (
        make_url(postgres_server)
        .update_query_dict({"options": f"-csearch_path={schema}"})
        .render_as_string(hide_password=False)
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {schema} CASCADE".encode())


@pytest.fixture(params=["sqlite", "postgresql"])
def log_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty log, in both databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return str(request.getfixturevalue("postgres_url"))
