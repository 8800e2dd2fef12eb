"""A stack for the end-to-end tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
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


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """Four nodes of one worker each; whatever a test does, no process is left."""
    async with Stack(tmp_path / "run", nodes=NODES, workers_per_node=1) as started:
        yield started
    assert processes_of(tmp_path) == []


@pytest.fixture
def client(stack: Stack) -> Client:
    """A client of the stack's API."""
    return Client(stack.url)
