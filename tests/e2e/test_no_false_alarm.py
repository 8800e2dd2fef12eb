"""Five minutes on busy cores raise no error event. Long: has a target of its own, ``make test-no-false-alarm``."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from cli.stack.stack import Stack
from tests.e2e.kit import Client, small_task

SOAK_S = 300.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SOAK_S + 240)]


def spin(seconds: float) -> None:
    """Keep one core busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def test_no_false_alarm(stack: Stack, client: Client, corpus: Path) -> None:
    """Two tasks train while another process keeps each core busy; the log holds no error."""

    def course() -> None:
        client.submit(small_task("left", corpus, steps=1_000_000, workers={"min": 1, "max": 2}))
        client.submit(small_task("right", corpus, steps=1_000_000, workers={"min": 1, "max": 2}))
        for name in ("left", "right"):
            client.until_step(name, 3)
        context = multiprocessing.get_context("spawn")
        load = [context.Process(target=spin, args=(SOAK_S,), daemon=True) for _ in range(os.cpu_count() or 1)]
        for process in load:
            process.start()
        before = {name: client.task(name)["step"] for name in ("left", "right")}
        for process in load:
            process.join()
        assert client.items("/v1/incidents") == []
        for name, step in before.items():
            task = client.task(name)
            assert task["state"] == "running"
            assert task["step"] > step + 10
            assert task["generation"] == 1

    await asyncio.to_thread(course)
