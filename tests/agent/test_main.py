"""The agent's process before it joins."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from shared.messages.admission import HELLO, Answer
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S, Ear
from tests.agent.program import running
from tests.agent.recorded_nvml import COMPILER, RecordedNvml


@pytest.mark.skipif(os.geteuid() != 0, reason="a host name of one's own needs root")
@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library")
async def test_a_worker_whose_device_does_not_exist_is_refused(settings: Settings, tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml", devices=1)
    async with running(settings, "n0", tmp_path / "agent.log", environment=nvml.environment) as agent:
        async with asyncio.timeout(WAIT_S):
            assert await agent.process.wait() == 2
    assert (
        "no-device: node n0: worker n0/1 has no device: 1 device is there (0: NVIDIA H100 80GB HBM3); "
        "set UNICRON_WORKERS_PER_NODE to 1 or less, or UNICRON_HARDWARE=cpu for workers without devices"
    ) in agent.log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library")
@pytest.mark.parametrize(
    ("variables", "kind", "seen"),
    [
        ({"UNICRON_HARDWARE": "cpu"}, "cpu", ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu", ""),
        ({"UNICRON_WORKERS_PER_NODE": "1"}, "h100", None),
    ],
)
async def test_a_node_without_devices_hides_those_of_the_machine(
    variables: dict[str, str], kind: str, seen: str | None, settings: Settings, ear: Ear, tmp_path: Path
) -> None:
    """From its fork server as well: what that imports may look for devices."""

    async def admit(_: bytes) -> bytes:
        return Answer(verdict="admitted").model_dump_json().encode()

    await ear.bus.answer(HELLO.subject, lambda _, data: admit(data))
    nvml = RecordedNvml(tmp_path / "nvml", devices=1)
    environment = {**nvml.environment, **variables}
    async with running(settings, "n0", tmp_path / "agent.log", environment=environment) as agent:
        async with asyncio.timeout(WAIT_S):
            await agent.ready()
        await ear.until(lambda: bool(ear.heartbeats))
        assert ear.heartbeats[-1].hardware == kind
        [server] = [
            child for child in psutil.Process(agent.process.pid).children() if "tests.agent.stand_in" in child.cmdline()
        ]
        assert server.environ().get("CUDA_VISIBLE_DEVICES") == seen
