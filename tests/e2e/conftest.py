"""A stack for the end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from cli.stack.stack import Stack
from services.planner.replay.replay import verify
from shared.log.log import EventLog
from tests.e2e.kit import Client, make_corpus, processes_of

NODES = 4


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated text of about 1 MB."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Four nodes of one worker each, for all tests; at the end its log replays, and no process is left."""
    run_dir = tmp_path_factory.mktemp("stack") / "run"
    environment = {"UNICRON_FAULT_INJECTION": "1"}
    async with Stack(run_dir, nodes=NODES, workers_per_node=1, environment=environment) as started:
        yield started
    assert processes_of(run_dir) == []
    log = EventLog(f"sqlite:///{run_dir / 'log.db'}", read_only=True)
    report = verify(log)
    log.close()
    assert report.mismatches == []
    assert report.chain_ok
    assert report.verified == report.plans > 0


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    """A client of the stack's API."""
    with Client(stack.url) as client:
        yield client
