"""Metrics of a node's devices: the newest readings, and the faults since the agent started."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from services.agent.machine.device_health import CLOCKS_NOTES
from services.agent.machine.device_watch import DeviceWatch
from shared.service.metrics import counter, gauge

_SLOWED = sum(CLOCKS_NOTES)
"""Bits of the reasons for which a device is slower than it could be."""


def device_metrics(watch: DeviceWatch) -> Iterator[Metric]:
    """Yield the metrics; a device without a value has no series."""
    readings = {str(device): health.reading for device, health in watch.health.items()}

    def values(name: str) -> dict[tuple[str, ...], float]:
        found = {device: getattr(reading, name) for device, reading in readings.items()}
        return {(device,): float(value) for device, value in found.items() if value is not None}

    described = {
        (str(device.index), device.name, device.uuid, ",".join(watch.workers_of(device.index))): 1.0
        for device in watch.devices
    }
    text = "1, with NVML's name of a device, and its workers."
    yield gauge("unicron_agent_device_info", text, described, "device", "name", "uuid", "workers")
    yield gauge("unicron_agent_device_temperature_celsius", "Temperature.", values("temperature_c"), "device")
    used = {device: percent / 100 for device, percent in values("utilisation_percent").items()}
    text = "Part of the time in which a kernel ran on a device."
    yield gauge("unicron_agent_device_utilisation_ratio", text, used, "device")
    memory = {(str(device.index),): float(device.memory_bytes) for device in watch.devices if device.memory_bytes}
    yield gauge("unicron_agent_device_memory_bytes", "Memory of a device.", memory, "device")
    text = "Memory of a device that all processes together use."
    yield gauge("unicron_agent_device_memory_used_bytes", text, values("memory_used_bytes"), "device")
    slowed = {
        (device,): float(bool(reading.clocks_reasons & _SLOWED))
        for device, reading in readings.items()
        if reading.clocks_reasons is not None
    }
    text = "Whether a device is slowed down by heat or power, the ordinary power limit aside."
    yield gauge("unicron_agent_device_slowed", text, slowed, "device")
    text = "Uncorrectable memory errors since the driver was loaded."
    yield counter("unicron_agent_device_ecc_uncorrectable_total", text, values("ecc_uncorrectable"), "device")
    text = "CRC errors, replays and recoveries of NVLink since the driver was loaded."
    yield counter("unicron_agent_device_nvlink_errors_total", text, values("nvlink_errors"), "device")
    text = "Whether the remapping of a memory row waits for a reset."
    yield gauge("unicron_agent_device_remap_pending", text, values("remap_pending"), "device")
    faults = {(str(device), fault): float(count) for (device, fault), count in watch.faults.items()}
    text = "Faults that devices have reported: Xid codes and conditions."
    yield counter("unicron_agent_device_faults_total", text, faults, "device", "fault")
