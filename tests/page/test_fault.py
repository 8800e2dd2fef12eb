"""The live page while a real task trains and loses a rank (`make test-page`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cli.stack.children import SERVICES
from cli.stack.stack import Stack
from tests.cli.conftest import call_unicron
from tests.e2e.kit import Client, Pace, make_corpus, processes_of, small_task
from tests.page.kit import browsing_at

pytestmark = [pytest.mark.page, pytest.mark.timeout(240)]

TASK = "watched"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """Two nodes of one worker each, on which faults may be injected."""
    run_dir = tmp_path / "run"
    async with Stack(run_dir, nodes=2, workers_per_node=1, environment={"UNICRON_FAULT_INJECTION": "1"}) as started:
        yield started
    assert processes_of(run_dir) == []


@contextmanager
def suspended(service: str) -> Iterator[None]:
    """Let a service of the stack do nothing meanwhile (SIGSTOP)."""
    (process,) = (one for one in psutil.Process().children() if one.cmdline()[-1:] == [SERVICES[service]])
    process.suspend()
    try:
        yield
    finally:
        process.resume()


async def test_an_injected_fault_is_shown_from_its_detection_to_its_end(stack: Stack, tmp_path: Path) -> None:
    pace = Pace(tmp_path, 0.01)

    def train() -> None:
        with Client(stack.url) as client:
            client.submit(pace.of(small_task(TASK, make_corpus(tmp_path), steps=1000, workers={"min": 2, "max": 2})))
            client.until_step(TASK, 5)

    await asyncio.to_thread(train)
    async with browsing_at(stack.url) as browser:
        await browser.open()
        await browser.shows("#task-rows tr", TASK)
        await browser.shows("#summary", "● no trouble")
        await browser.page.evaluate("window.unicronTest = 'the same document'")
        # As long as nothing is decided the incident stays open, however slow the browser is.
        with suspended("planner"):
            injected = await call_unicron("inject", TASK, "--fault", "kill", "--rank", "1", server=stack.url)
            assert (injected.code, injected.err) == (0, "")
            await browser.shows("#incident-rows tr.open", "process-exit")
            await browser.shows("#incident-rows tr.open", "(rank 1)")
            await browser.shows("#trouble-list li.grave", "SEV2: process-exit of")
            await browser.shows("#trouble-list li.grave", f"hits {TASK}")
        await browser.shows("#incident-rows tr:not(.open)", "● closed")
        await browser.shows("#plan-list", "restart (error)")
        await browser.shows("#summary", "● no trouble")
        assert await browser.page.evaluate("window.unicronTest") == "the same document"
        await browser.page.locator("#task-rows a", has_text=TASK).click()
        await browser.shows("#course-text", "1 incident in this time")
        # The rank that was killed has said so before; its successor is of a later generation.
        await browser.shows("#output-text", "injected fault")
        await browser.page.locator("#output-search").fill("INJECTED fault")
        await browser.shows("#output-count", "1 of ")
        await browser.page.locator("#output-rank").select_option("0")
        await browser.shows("#output-count", "0 of ")
        browser.check()
    pace.end()
