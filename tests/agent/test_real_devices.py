"""NVML's real library and real devices."""

from __future__ import annotations

import pytest

from services.agent.machine import hardware, nvml
from services.agent.machine.device_health import lasting_faults
from services.agent.machine.device_watch import DeviceWatch
from shared.clock import PROCESS_CLOCK
from shared.messages.signals import Signal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hardware.devices(None).names, reason="there is no NVIDIA device"),
]


def test_the_driver_answers_the_questions_of_a_reading() -> None:
    driver, _ = nvml.connect()
    assert driver is not None
    try:
        found = driver.devices()
        assert driver.listen(found) > 0
        assert driver.wait(1) is None
        for device in found:
            assert driver.place(device.uuid, found) == (device.index, None)
            reading = driver.read(device)
            assert lasting_faults(reading) == frozenset()
            assert 0 < (reading.temperature_c or 0) < 120
            assert reading.clocks_reasons is not None
            assert 0 <= (reading.memory_used_bytes or -1) <= (device.memory_bytes or 0)
            assert 0 <= (-1 if reading.utilisation_percent is None else reading.utilisation_percent) <= 100
    finally:
        driver.close()


async def test_devices_that_work_are_watched_and_signal_nothing() -> None:
    signals: list[Signal] = []
    found = hardware.of_node("n0", ["n0/0"], setting="", visible=None)
    watch = DeviceWatch("n0", "i", found, signals.extend, PROCESS_CLOCK, read_interval_s=0.1)
    await watch.start()
    try:
        assert watch.devices
        assert await watch.problem() == ""
        watch.inject(79)
        assert [signal.signal_id != "" for signal in signals] == [True]
    finally:
        await watch.stop()
