"""The agent's watch over devices, with the real pynvml over a recorded NVML."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pynvml
import pytest

from services.agent.machine.device_health import ECC_SETTLE_S, DeviceHealth
from services.agent.machine.device_watch import DeviceWatch
from services.agent.machine.hardware import NodeHardware
from services.agent.machine.nvml import Reading
from services.agent.metrics import device_metrics
from shared.clock import PROCESS_CLOCK
from shared.errors import InvalidInput
from shared.messages.signals import DeviceFailed, Signal
from tests.agent.recorded_nvml import COMPILER, RecordedNvml
from tests.condition import until

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the stand-in library")

WORKERS = ["n0/0", "n0/1"]


class Watched:
    """A watch, and what it signals."""

    def __init__(self, found: NodeHardware, read_interval_s: float = 3600.0) -> None:
        self.signals: list[DeviceFailed] = []
        self.watch = DeviceWatch("n0", "i", found, self._put, PROCESS_CLOCK, read_interval_s=read_interval_s)

    def _put(self, signals: list[Signal]) -> None:
        self.signals += [signal for signal in signals if isinstance(signal, DeviceFailed)]

    async def until(self, *faults: str) -> list[DeviceFailed]:
        """Wait until these faults have been signalled; return all signals."""
        await until(lambda: set(faults) <= {signal.fault for signal in self.signals}, seen=lambda: self.signals)
        return self.signals


@contextlib.asynccontextmanager
async def watched(nvml: RecordedNvml, *entries: str, read_interval_s: float = 3600.0) -> AsyncIterator[Watched]:
    """Watch the devices of a node that has two workers: one each, unless other entries are listed."""
    with nvml.loaded():
        found = Watched(NodeHardware("h100", tuple(WORKERS), entries or ("0", "1")), read_interval_s)
        await found.watch.start()
        try:
            yield found
        finally:
            await found.watch.stop()


async def test_a_healthy_device_is_shown_as_well_once_after_each_look(tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml", devices=2)
    nvml.answer(device__1__utilisation="3", device__1__temperature="31")
    async with watched(nvml) as found:
        both = found.watch.new_readings()
        assert [one.model_dump() for one in both] == [
            {
                "device": device,
                "uuid": f"GPU-{device}",
                "name": "NVIDIA H100 80GB HBM3",
                "workers": [f"n0/{device}"],
                "memory_bytes": 85_520_809_984,
                "driver": "550.54.15",
                "temperature_c": celsius,
                "utilisation_percent": percent,
                "memory_used_bytes": 61_203_283_968,
            }
            for device, celsius, percent in ((0, 50, 97), (1, 31, 3))
        ]
        assert found.watch.statuses() == []
        assert found.watch.new_readings() == []
        nvml.answer(device__0__temperature="60", device__0__remap_failure="1")
        nvml.push(154)
        await found.until("row-remap-failure")  # of the same look
        assert found.watch.new_readings()[0].temperature_c == 60


@pytest.mark.parametrize("xid", [79, 48, 63, 64, 74, 31, 13, 94, 95, 4242])
async def test_an_xid_is_signalled_with_its_device_and_workers(xid: int, tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml", devices=2)
    async with watched(nvml) as found:
        nvml.push(xid, device=1)
        [signal] = await found.until(f"xid-{xid}")
        assert (signal.device, signal.uuid, signal.name) == (1, "GPU-1", "NVIDIA H100 80GB HBM3")
        assert signal.workers == ["n0/1"]
        assert signal.readings["temperature_c"] == 50
        assert not signal.injected
        [status] = found.watch.statuses()
        assert (status.device, status.notes, status.faults) == (1, [], {f"xid-{xid}": 1})


async def test_a_double_bit_error_is_the_xid_that_the_driver_logs_for_it(tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml")
    async with watched(nvml) as found:
        nvml.push(0, kind=pynvml.nvmlEventTypeDoubleBitEccError)
        assert [signal.fault for signal in await found.until("xid-48")] == ["xid-48"]


async def test_a_storm_of_one_xid_is_counted_and_signalled_rarely(tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml")
    async with watched(nvml) as found:
        for _ in range(50):
            nvml.push(31)
        nvml.push(79)
        signals = await found.until("xid-79")
        assert len([signal for signal in signals if signal.fault == "xid-31"]) < 25
        assert found.watch.statuses()[0].faults == {"xid-31": 50, "xid-79": 1}


async def test_a_lost_device_makes_the_wait_fail_and_is_named_and_the_others_are_watched_on(tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml", devices=2)
    async with watched(nvml) as found:
        nvml.answer(device__1__error=str(pynvml.NVML_ERROR_GPU_IS_LOST))
        nvml.fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        [signal] = await found.until("gpu-lost")
        assert (signal.device, signal.uuid, signal.workers) == (1, "GPU-1", ["n0/1"])
        assert "device is lost" in await found.watch.problem()
        nvml.push(94, device=0)
        assert {signal.fault for signal in await found.until("xid-94")} == {"gpu-lost", "xid-94"}


@pytest.mark.parametrize(("action", "fault"), [("1", "reset-required"), ("2", "reboot-required"), ("3", "drain-peers")])
async def test_an_event_has_the_recovery_action_read_at_once(action: str, fault: str, tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml")
    async with watched(nvml) as found:
        nvml.answer(device__0__field__230=action)
        nvml.push(154)
        assert [signal.fault for signal in await found.until(fault)] == ["xid-154", fault]


async def test_what_lasts_is_signalled_at_the_start_and_once(tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml")
    nvml.answer(device__0__remap_failure="1")
    async with watched(nvml) as found:
        assert [signal.fault for signal in found.signals] == ["row-remap-failure"]
        nvml.push(31)
        nvml.push(79)
        await found.until("xid-79")
        assert "row could not be remapped" in await found.watch.problem()
        nvml.answer(device__0__remap_failure="0")
        assert await found.watch.problem() == ""
    assert found.watch.faults == {(0, "row-remap-failure"): 1, (0, "xid-31"): 1, (0, "xid-79"): 1}


async def test_heat_and_throttling_are_no_faults_and_are_shown(tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml", devices=2)
    nvml.answer(device__1__temperature="92", device__1__clocks="0x44", device__1__remap_pending="1", device__1__ecc="2")
    async with watched(nvml) as found:
        assert found.signals == []
        [status] = found.watch.statuses()
        assert status.device == 1
        assert status.notes == [
            "slowed down by the hardware: too hot",
            "92 C, slows down at 90 C",
            "a memory row is remapped at the next reset",
            "2 uncorrectable memory errors since the driver was loaded",
        ]


async def test_links_that_lose_data_are_shown(tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml")
    async with watched(nvml) as found:
        nvml.answer(device__0__field__38="8", device__0__remap_failure="1")
        nvml.push(154)
        await found.until("row-remap-failure")  # of the same reading
        assert found.watch.statuses()[0].notes == ["5 NVLink errors since the agent started"]


@pytest.mark.parametrize("without", [("EVENTS",), ("REMAPPING",), ("EVENTS", "REMAPPING")])
async def test_a_driver_without_a_function_is_asked_for_the_rest(
    without: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = RecordedNvml(tmp_path / "nvml", without=without)
    async with watched(nvml, read_interval_s=0.05) as found:
        assert ("the driver reports no events" in caplog.text) == ("EVENTS" in without)
        assert found.watch.health[0].reading.clocks_reasons == 4
        assert (found.watch.health[0].reading.remap_failure is None) == ("REMAPPING" in without)
        nvml.answer(device__0__error=str(pynvml.NVML_ERROR_GPU_IS_LOST))
        await found.until("gpu-lost")


async def test_workers_without_devices_have_nothing_that_is_watched(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Also on a machine that has devices: a fault of one that the node does not use is no fault of the node."""
    caplog.set_level(logging.INFO)
    with RecordedNvml(tmp_path / "nvml").loaded():
        found = Watched(NodeHardware("cpu", tuple(WORKERS)))
        await found.watch.start()
        assert found.watch.statuses() == []
        assert found.watch.devices == []
        assert await found.watch.problem() == ""
        found.watch.inject(79, device=1)
        [signal] = found.signals
        assert (signal.fault, signal.workers, signal.injected) == ("xid-79", ["n0/1"], True)
        with pytest.raises(InvalidInput, match="device 7: node n0 has no such device; one of 0, 1 is allowed"):
            found.watch.inject(79, device=7)
        await found.watch.stop()
    assert caplog.text.count("no devices are watched: the workers have none") == 1


async def test_an_event_of_a_mig_instance_concerns_its_workers(tmp_path: Path) -> None:
    nvml = RecordedNvml(tmp_path / "nvml")
    nvml.answer(**{"mig__MIG-a": "0 1", "mig__MIG-b": "0 2"})
    async with watched(nvml, "MIG-a", "MIG-b") as found:
        nvml.push(94, instance=2)
        nvml.push(79)
        part, whole = await found.until("xid-94", "xid-79")
        assert (part.fault, part.workers) == ("xid-94", ["n0/1"])
        assert (whole.fault, whole.workers) == ("xid-79", WORKERS)


async def test_only_the_devices_that_the_node_may_use_are_watched(tmp_path: Path) -> None:
    """Several nodes of one machine have parts of its devices: each reports the faults of its own."""
    nvml = RecordedNvml(tmp_path / "nvml", devices=4)
    async with watched(nvml, "GPU-1", "0", "2") as found:
        assert [found.watch.workers_of(device) for device in range(4)] == [["n0/1"], ["n0/0"], [], []]
        assert [device.index for device in found.watch.devices] == [0, 1, 2]
        nvml.push(79, device=3)
        nvml.push(79, device=2)
        assert [signal.device for signal in await found.until("xid-79")] == [2]


def health(*counts: int) -> DeviceHealth:
    found = DeviceHealth()
    for at_s, count in enumerate(counts):
        assert found.take(Reading(ecc_uncorrectable=count), float(at_s)) == []
    return found


def test_memory_errors_that_no_xid_explains_are_a_fault_once() -> None:
    found = health(2, 2, 3)
    assert found.take(Reading(ecc_uncorrectable=3), 2.0 + ECC_SETTLE_S) == ["ecc-uncorrectable"]
    assert found.take(Reading(ecc_uncorrectable=3), 3.0 + ECC_SETTLE_S) == []


@pytest.mark.parametrize("at_s", [1.5, 3.0])
def test_memory_errors_that_an_xid_explains_are_not(at_s: float) -> None:
    found = health(2, 2, 3)
    found.note_xid(94, at_s)
    assert found.take(Reading(ecc_uncorrectable=3), 2.0 + ECC_SETTLE_S) == []
    assert found.take(Reading(ecc_uncorrectable=3), 3.0 + ECC_SETTLE_S) == []


async def test_what_a_device_is_and_how_it_is_are_metrics(tmp_path: Path) -> None:
    async with watched(RecordedNvml(tmp_path / "nvml")) as found:
        samples = {s.name: (s.labels, s.value) for metric in device_metrics(found.watch) for s in metric.samples}
    about = {"device": "0", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "workers": "n0/0"}
    assert samples["unicron_agent_device_info"] == (about, 1.0)
    mine = {"device": "0"}
    assert samples["unicron_agent_device_temperature_celsius"] == (mine, 50.0)
    assert samples["unicron_agent_device_utilisation_ratio"] == (mine, 0.97)
    assert samples["unicron_agent_device_memory_bytes"] == (mine, 85_520_809_984.0)
    assert samples["unicron_agent_device_memory_used_bytes"] == (mine, 61_203_283_968.0)
