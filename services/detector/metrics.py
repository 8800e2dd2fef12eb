"""Metrics of the detector: the heartbeats that it hears, and the signals that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from services.detector.decide import Monitor
from services.detector.decisions import limits_in_force
from shared.model import Clock
from shared.service.metrics import StateMetrics, counter, gauge


class DetectorMetrics:
    """Takes note of what is received.

    Args:
        registry: of the process.
        monitor: returns the detector's monitor.
        clock: the detector's.
    """

    def __init__(self, registry: CollectorRegistry, monitor: Callable[[], Monitor], clock: Clock) -> None:
        self._monitor, self._clock = monitor, clock
        self._heartbeats = 0
        self._signals: Counter[str] = Counter()
        registry.register(StateMetrics(self._read))

    def heard(self) -> None:
        """Take note of a heartbeat."""
        self._heartbeats += 1

    def signalled(self, kind: str) -> None:
        """Take note of a signal."""
        self._signals[kind] += 1

    def _read(self) -> Iterator[Metric]:
        yield counter("unicron_heartbeats_received_total", "Heartbeats of all nodes.", self._heartbeats)
        signals = {(kind,): float(count) for kind, count in self._signals.items()}
        yield counter("unicron_signals_received_total", "Signals of agents.", signals, "kind")
        yield gauge("unicron_heartbeat_age_seconds", "Time since a node was heard.", self._ages(), "node")
        monitor = self._monitor()
        nodes = [node for node in monitor.state.nodes.values() if node.present]
        silence = {(node.name,): monitor.silence_limits.of(node).limit_s for node in nodes}
        yield gauge("unicron_silence_limit_seconds", "Silence of a node that counts.", silence, "node")
        now = self._clock()
        suspicion = {(node.name,): limits_in_force.phi(node, now) for node in nodes}
        yield gauge("unicron_silence_phi", "How suspicious the silence of a node is (phi).", suspicion, "node")
        longest = limits_in_force.longest_of_tasks(monitor.state, monitor.silence_limits)
        hangs = {(task,): seconds for task, seconds in longest.items()}
        yield gauge("unicron_hang_limit_seconds", "Longest limit for a hang of a task's ranks.", hangs, "task")
        cut_off = float(self._monitor().state.cut_off_since is not None)
        yield gauge("unicron_control_plane_cut_off", "Whether no node is heard and none is known to be lost.", cut_off)

    def _ages(self) -> dict[tuple[str, ...], float]:
        """Return for how long each node that takes part has been silent, in seconds."""
        now = self._clock()

        def age_s(at: datetime) -> float:
            return max(0.0, (now - at).total_seconds())

        nodes = self._monitor().state.nodes.values()
        return {(node.name,): age_s(node.heard_at) for node in nodes if node.present and node.heard_at is not None}
