"""Metrics of a node's agent: its ranks, its heartbeats, and the signals that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from services.agent.cluster.heartbeats import Heartbeats
from services.agent.cluster.signals import SignalQueue
from services.agent.machine.device_metrics import device_metrics
from services.agent.machine.device_watch import DeviceWatch
from services.agent.node.slots import Node
from services.agent.ranks.output_limits import LEFT_OUT
from shared.clock import SteadyClock
from shared.service.metrics import StateMetrics, counter, gauge


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
