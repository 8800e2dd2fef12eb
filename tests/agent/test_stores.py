"""Rendezvous stores: when a node opens one, and when it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from services.agent.agent import Agent
from tests.agent.kit import SPEC, WAIT_S, Driver, listens, parent, train


async def fork_server(driver: Driver) -> int:
    """Return the pid of the fork server: the parent of a process that is started for this."""
    probed = await driver.ask("prepare", 0, workers=["n0/1"], spec={**SPEC, "name": "other"}, task="other")
    pid = parent(probed.workers["n0/1"].pid or 0)
    assert (await driver.ask("release", 0, workers=["n0/1"], task="other")).ok
    return pid


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("newer", "code"),
    [
        ({"kind": "release", "generation": 1, "all_workers": True}, "unavailable"),
        ({"kind": "hold", "generation": 2}, "fenced"),
    ],
)
async def test_a_store_that_is_not_wanted_any_more_when_it_opens_is_closed(
    agent: Agent, driver: Driver, newer: dict[str, Any], code: str
) -> None:
    server = await fork_server(driver)
    os.kill(server, signal.SIGSTOP)
    try:
        opening = asyncio.create_task(driver.ask("open-store", 1))
        await asyncio.sleep(0)
        assert (await driver.ask("hold", 1, workers=[])).ok  # commands arrive in order: the store's has begun
        assert (await driver.ask(**newer, plan="newer", workers=[])).ok
    finally:
        os.kill(server, signal.SIGCONT)
    answer = await opening
    assert (answer.ok, answer.code) == (False, code)
    assert len(agent._stores) == 0
    async with asyncio.timeout(WAIT_S):
        while await asyncio.to_thread(children, server):
            pass  # killed, and reaped a moment later


async def test_a_release_leaves_the_store_of_a_newer_plan(agent: Agent, driver: Driver) -> None:
    pids = await train(driver)
    server = parent(pids["n0/0"])
    os.kill(server, signal.SIGSTOP)  # the end of the processes is not reported
    try:
        releasing = asyncio.create_task(driver.ask("release", 2, workers=driver.workers, all_workers=True))
        await asyncio.sleep(0)
        opening = asyncio.create_task(driver.ask("open-store", 3))
        await asyncio.sleep(0)
        assert (await driver.ask("hold", 3, workers=[])).ok  # both have begun
    finally:
        os.kill(server, signal.SIGCONT)
    assert (await releasing).ok
    answer = await opening
    assert answer.ok, answer
    assert await listens(answer.host, answer.port)


async def test_a_store_opened_again_leaves_no_handle_of_the_first(agent: Agent, driver: Driver) -> None:
    def handles() -> int:
        found = 0
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the folder's own
                found += "pidfd" in os.readlink(link)
        return found

    assert (await driver.ask("open-store", 1)).ok
    before = handles()
    assert (await driver.ask("open-store", 1)).ok
    assert handles() == before
