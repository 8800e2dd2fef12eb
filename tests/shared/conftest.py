"""A log in either database, for the tests of the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import empty_schema


@pytest.fixture
def other_postgres_url(postgres_server: str) -> Iterator[str]:
    """URL of another empty schema."""
    with empty_schema(postgres_server) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def log_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty log, in both databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return str(request.getfixturevalue("postgres_url"))
