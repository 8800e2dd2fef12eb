"""A run directory that does not answer keeps the requests for its files, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from services.api.output import node_files
from services.api.output.node_files import OwnFiles
from shared.errors import Unavailable
from shared.messages.node_files import ListOutput
from shared.messages.task_folders import TaskFolders


async def test_other_threads_are_free_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(node_files, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(TaskFolders, "answer", lambda *_: over.wait(100))
    files = OwnFiles(tmp_path)
    try:
        # More than a machine of 16 cores has threads in the event loop's own pool.
        reading = [asyncio.create_task(files.ask(ListOutput(task="gpt", nodes=["n0"]))) for _ in range(40)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await asyncio.to_thread(int)
            answers = await asyncio.gather(*reading, return_exceptions=True)
        assert all(isinstance(answer, Unavailable) for answer in answers)
    finally:
        over.set()
