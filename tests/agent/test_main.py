"""The agent's process before it joins."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from shared.settings import Settings
from tests.agent.kit import WAIT_S
from tests.agent.program import running


@pytest.mark.skipif(os.geteuid() != 0, reason="a host name of one's own needs root")
async def test_a_host_name_that_is_no_node_name_is_refused(settings: Settings, tmp_path: Path) -> None:
    wrapper = ["unshare", "--uts", "sh", "-c", 'echo my_host > /proc/sys/kernel/hostname && exec "$@"', "sh"]
    async with running(settings, "", tmp_path / "agent.log", wrapper=wrapper) as agent:
        async with asyncio.timeout(WAIT_S):
            assert await agent.process.wait() == 2
    text = agent.log.read_text()
    assert "invalid-input" in text
    assert "set UNICRON_NODE (given: 'my_host')" in text


async def test_a_name_that_is_no_node_name_is_refused(settings: Settings, tmp_path: Path) -> None:
    async with running(settings, "n0.example", tmp_path / "agent.log") as agent:
        async with asyncio.timeout(WAIT_S):
            assert await agent.process.wait() == 2
    assert "node: " in agent.log.read_text()
