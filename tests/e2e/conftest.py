"""A stack for the end-to-end tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from cli.stack import Stack
from tests.e2e.kit import Client, processes_of

NODES = 4


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated text of about 1 MB."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    subprocess.run([sys.executable, "-P", "-m", "unicron.corpus", str(path), "--seed", "1"], check=True, timeout=60)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Four nodes of one worker each, for all tests (a start takes ten seconds); no process is left at the end."""
    run_dir = tmp_path_factory.mktemp("stack") / "run"
    async with Stack(run_dir, nodes=NODES, workers_per_node=1) as started:
        yield started
    assert processes_of(run_dir) == []


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    """A client of the stack's API."""
    with Client(stack.url) as client:
        yield client
