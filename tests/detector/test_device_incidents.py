"""From the driver's event to the incident: a real agent's process over a recorded NVML, a real bus, a real detector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from services.agent.agent import Agent
from shared.bus.connection import Bus
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, NodeJoined
from shared.messages.self_test import SELF_TEST, SelfTest
from shared.messages.signals import HEARTBEATS
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S, Driver, Ear
from tests.agent.program import running
from tests.agent.recorded_nvml import COMPILER, RecordedNvml
from tests.detector.conftest import LogWatch
from tests.detector.test_monitor import of, train

compiled = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library")


async def until_errors(monitor: LogWatch, count: int) -> list[Any]:
    return of(await monitor.until(lambda found: len(of(found, ErrorDetected)) >= count), ErrorDetected)


@compiled
async def test_from_the_drivers_event_to_the_incident(
    monitor: LogWatch, settings: Settings, bus: Bus, tmp_path: Path
) -> None:
    """Xid 94 hits a worker, whose processes are to be started again; then the other device falls off the bus."""
    nvml = RecordedNvml(tmp_path / "nvml", devices=2)
    ear = Ear(bus)
    await bus.listen(HEARTBEATS.subject, ear.heartbeat)
    async with running(settings, "n0", settings.run_dir / "agent.log", environment=nvml.environment) as agent:
        await agent.ready()
        joined = await monitor.until(lambda found: bool(of(found, NodeJoined)))
        assert of(joined, NodeJoined)[0].hardware == "h100"
        await train(monitor.journal, Driver(bus))
        nvml.push(31, device=1)
        nvml.push(94, device=1)
        [contained] = await until_errors(monitor, 1)
        assert (contained.kind, contained.severity) == (ErrorKind.DEVICE, Severity.SEV2)
        assert (contained.task, contained.worker, contained.evidence["fault"]) == ("gpt", "n0/1", "xid-94")
        nvml.answer(device__0__error=str(pynvml.NVML_ERROR_GPU_IS_LOST))
        nvml.push(79, device=0)
        nvml.fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        _, lost = await until_errors(monitor, 2)
        assert (lost.kind, lost.severity, lost.method) == (ErrorKind.DEVICE, Severity.SEV1, Method.DEVICE)
        assert (lost.node, lost.task, lost.evidence["fault"], lost.evidence["uuid"]) == ("n0", None, "xid-79", "GPU-0")
        faults = {0: {"xid-79": 1, "gpu-lost": 1}, 1: {"xid-31": 1, "xid-94": 1}}
        await ear.until(lambda: {one.device: one.faults for one in ear.heartbeats[-1].devices} == faults)
        request = SelfTest().model_dump_json().encode()
        answer = SELF_TEST.reply.decode(await bus.request(SELF_TEST.at("n0"), request, timeout_s=WAIT_S))
        assert answer.problem == "devices: device 0 (NVIDIA H100 80GB HBM3): NVML says that the device is lost " + (
            "(NVML_ERROR_GPU_IS_LOST)"
        )
    assert len(await until_errors(monitor, 2)) == 2


@compiled
@pytest.mark.slow
async def test_a_device_that_is_broken_when_the_agent_starts_keeps_its_node_out(
    monitor: LogWatch, settings: Settings, tmp_path: Path
) -> None:
    nvml = RecordedNvml(tmp_path / "nvml", devices=2)
    nvml.answer(device__0__field__230=str(pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET))
    async with running(settings, "n0", settings.run_dir / "agent.log", environment=nvml.environment) as agent:
        await agent.ready()
        [error] = await until_errors(monitor, 1)
    events = [record.event for record in monitor.journal.log.read()]
    assert (error.severity, error.evidence["fault"]) == (Severity.SEV1, "reset-required")
    assert events.index(of(events, NodeJoined)[0]) < events.index(error)


async def test_an_injected_xid_is_an_incident_without_any_driver(
    monitor: LogWatch, agent: Agent, driver: Driver
) -> None:
    await monitor.until(lambda found: bool(of(found, NodeJoined)))
    await train(monitor.journal, driver)
    agent.devices.inject(79, 1)
    [error] = await until_errors(monitor, 1)
    assert (error.severity, error.node, error.evidence["injected"]) == (Severity.SEV1, "n0", True)
    assert error.evidence["device_workers"] == ["n0/1"]
