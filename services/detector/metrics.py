"""Metrics of the detector: the heartbeats that it hears, and the signals that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from prometheus_client.metrics_core import Metric

from services.detector.decisions import limits_in_force
from services.detector.decisions.decision import DetectorLimits
from services.detector.reading_lag import ReadingLag
from services.detector.state.cluster import DetectorState
from shared.messages.signals import Heartbeat, SignalBase
from shared.service.metrics import counter, gauge


def detector_metrics(
    state: DetectorState, limits: DetectorLimits, taken: Mapping[type, int], lag: ReadingLag, now: datetime
) -> Iterator[Metric]:
    """Yield the metrics of a moment.

    Args:
        state: the detector's.
        limits: its thresholds.
        taken: how many inputs of each type it has taken.
        lag: how far it is behind in reading heartbeats.
        now: the time.
    """
    received = taken.get(Heartbeat, 0) + lag.skipped
    yield counter("unicron_heartbeats_received_total", "Heartbeats of all nodes.", received)
    yield gauge("unicron_heartbeats_reading_seconds", "How long the newest heartbeats took to read.", lag.seconds)
    text = "Heartbeats that a newer one of their node replaced before they were read."
    yield counter("unicron_heartbeats_skipped_total", text, lag.skipped)
    signals = {
        (kind.model_fields["kind"].default,): float(n) for kind, n in taken.items() if issubclass(kind, SignalBase)
    }
    yield counter("unicron_signals_received_total", "Signals of agents.", signals, "kind")
    yield gauge("unicron_heartbeat_age_seconds", "Time since a node was heard.", _ages(state, now), "node")
    nodes = [node for node in state.nodes.values() if node.present]
    silence = {(node.name,): limits.silence.of(node).limit_s for node in nodes}
    yield gauge("unicron_silence_limit_seconds", "Silence of a node that counts.", silence, "node")
    suspicion = {(node.name,): limits_in_force.phi(node, now) for node in nodes}
    yield gauge("unicron_silence_phi", "How suspicious the silence of a node is (phi).", suspicion, "node")
    longest = limits_in_force.longest_of_tasks(state, limits.silence)
    hangs = {(task,): seconds for task, seconds in longest.items()}
    yield gauge("unicron_hang_limit_seconds", "Longest limit for a hang of a task's ranks.", hangs, "task")
    cut_off = float(state.cut_off_since is not None)
    yield gauge("unicron_control_plane_cut_off", "Whether no node is heard and none is known to be lost.", cut_off)


def _ages(state: DetectorState, now: datetime) -> dict[tuple[str, ...], float]:
    """Return for how long each node that takes part has been silent, in seconds."""
    heard = [(node.name, node.heard_at) for node in state.nodes.values() if node.present and node.heard_at is not None]
    return {(name,): max(0.0, (now - at).total_seconds()) for name, at in heard}
