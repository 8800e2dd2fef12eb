"""Two agents with one name, on a real bus, with a real detector and real agent processes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from services.agent.files.snapshot_folders import node_folder
from shared.bus.connection import Bus
from shared.events.union import ErrorDetected, NodeJoined
from shared.log.journal import Journal
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S, Driver
from tests.agent.program import running
from tests.detector.conftest import LogWatch, patient, watching


@pytest.mark.slow
async def test_a_second_agent_with_a_name_in_use_is_refused_and_harms_nobody(
    monitor: LogWatch, settings: Settings, bus: Bus, tmp_path: Path
) -> None:
    async with running(settings, "n0", tmp_path / "first.log") as first:
        await first.ready()
        joined = await monitor.until(bool)
        async with running(settings, "n0", tmp_path / "second.log") as second:
            async with asyncio.timeout(WAIT_S):
                code = await second.process.wait()
        refusal = second.log.read_text()
        assert code == 4, refusal
        for word in ("name-in-use", "node name n0 is in use", "UNICRON_NODE"):
            assert word in refusal
        assert first.process.returncode is None
        driver = Driver(bus)
        assert (await driver.prepare()).ok  # the one agent that answers commands
        assert [r.event for r in monitor.journal.log.read()] == joined


@pytest.mark.slow
async def test_an_agent_whose_predecessor_was_killed_joins_at_once(
    settings: Settings, bus: Bus, journal: Journal, tmp_path: Path
) -> None:
    async with watching(patient(settings), bus, journal) as monitor:
        async with running(settings, "n0", tmp_path / "first.log") as first:
            await first.ready()
            await monitor.until(bool)
            first.process.kill()
            await first.process.wait()
        async with running(settings, "n0", tmp_path / "second.log") as second:
            await second.ready()
            events = await monitor.until(lambda found: len(found) == 3)
    assert [type(event) for event in events] == [NodeJoined, ErrorDetected, NodeJoined]
    error = events[1]
    assert isinstance(error, ErrorDetected)
    # Not its silence, for which the limit is a minute: the detector has found that it ended, or heard its successor.
    ended = "no heartbeat, and its machine answers without an agent"
    assert error.evidence["reason"] in ("a new incarnation of the agent", ended)


@pytest.mark.slow
async def test_of_two_agents_that_start_together_one_is_refused(
    monitor: LogWatch, settings: Settings, tmp_path: Path
) -> None:
    async with (
        running(settings, "n0", tmp_path / "0.log") as first,
        running(settings, "n0", tmp_path / "1.log") as second,
    ):
        ends = [asyncio.create_task(agent.process.wait()) for agent in (first, second)]
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        [refused] = [agent for agent, end in zip((first, second), ends, strict=True) if end.done()]
        assert refused.process.returncode == 4
        assert "name-in-use" in refused.log.read_text()
        await (second if refused is first else first).ready()
        assert [type(event) for event in await monitor.until(bool)] == [NodeJoined]
        for end in ends:
            end.cancel()


@pytest.mark.slow
async def test_an_agent_that_was_replaced_while_it_stood_still_ends_and_harms_nobody(
    strict_monitor: LogWatch, settings: Settings, bus: Bus, tmp_path: Path
) -> None:
    monitor = strict_monitor
    snapshots = node_folder(settings.memory_dir, settings.run_dir, "n0")
    async with running(settings, "n0", tmp_path / "first.log") as first:
        await first.ready()
        await monitor.until(bool)
        first.signal_agent(signal.SIGSTOP)
        async with running(settings, "n0", tmp_path / "second.log") as second:
            await second.ready()
            events = await monitor.until(lambda found: len(found) == 3)
            assert [type(event) for event in events] == [NodeJoined, ErrorDetected, NodeJoined]
            try:
                snapshots.mkdir()
                first.signal_agent(signal.SIGCONT)
                async with asyncio.timeout(WAIT_S):
                    assert await first.process.wait() == 4
                assert snapshots.is_dir()  # they are the successor's
            finally:
                snapshots.rmdir()
            assert "name-in-use: the node name n0 was given to another agent" in first.log.read_text()
            assert (await Driver(bus).prepare()).ok
            assert [r.event for r in monitor.journal.log.read()] == events
