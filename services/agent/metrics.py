"""Metrics of a node's agent: its ranks, its heartbeats, and the signals that wait.

Those of the node's devices are the newest readings, and the faults since the agent started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from services.agent.cluster.heartbeats import Heartbeats
from services.agent.cluster.signals import SignalQueue
from services.agent.machine.device_health import CLOCKS_NOTES
from services.agent.machine.device_watch import DeviceWatch
from services.agent.node.slots import Node
from services.agent.ranks.output_limits import LEFT_OUT
from shared.clock import SteadyClock
from shared.service.metrics import StateMetrics, counter, gauge

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


class AgentMetrics:
    """Reads an agent's state.

    Args:
        node: of the agent.
        heartbeats: of the agent.
        signals: of the agent.
        clock: of the agent.
        counters: of the agent.
        devices: of the agent.
    """

    def __init__(
        self,
        node: Node,
        heartbeats: Heartbeats,
        signals: SignalQueue,
        clock: SteadyClock,
        counters: Mapping[str, int],
        devices: DeviceWatch,
    ) -> None:
        self._devices = devices
        self._node, self._heartbeats, self._signals = node, heartbeats, signals
        self._now_s, self._counters = clock.seconds, counters

    def register(self, registry: CollectorRegistry) -> None:
        """Add the metrics to a registry."""
        registry.register(StateMetrics(self._read))

    def _read(self) -> Iterator[Metric]:
        node = self._node
        states = Counter((process.task, process.phase or "starting") for process in node.processes())
        ranks = {key: float(count) for key, count in states.items()}
        yield gauge("unicron_agent_workers", "Worker slots of the node.", len(node.slots))
        yield gauge("unicron_agent_ranks", "Living rank processes, by phase.", ranks, "task", "phase")
        yield counter("unicron_agent_ranks_started_total", "Rank processes that were started.", node.started)
        ended = {(how,): float(count) for how, count in node.ended.items()}
        text = "Rank processes that have ended: as the agent asked or the task was done, or by themselves."
        yield counter("unicron_agent_ranks_ended_total", text, ended, "how")
        ages = {
            (process.worker,): max(0.0, self._now_s() - process.progress_at_s)
            for process in node.processes()
            if process.progress_at_s is not None
        }
        yield gauge("unicron_agent_progress_age_seconds", "Time since a rank reported progress.", ages, "worker")
        text = "Output of ranks that was deleted since it went beyond the limit."
        yield counter("unicron_agent_output_left_out_bytes_total", text, self._counters.get(LEFT_OUT, 0))
        at_s = self._heartbeats.published_at_s
        if at_s is not None:
            text = "Time since the node's newest heartbeat was published."
            yield gauge("unicron_agent_heartbeat_age_seconds", text, max(0.0, self._now_s() - at_s))
        yield counter("unicron_agent_heartbeats_total", "Heartbeats published.", self._heartbeats.sequence)
        yield gauge("unicron_agent_signals_waiting", "Signals without an answer.", len(self._signals.waiting))
        yield from device_metrics(self._devices)
