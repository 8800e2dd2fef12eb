"""Metrics of the detector: the heartbeats that it hears, the signals that it takes, and how far it is behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from datetime import datetime

from prometheus_client.metrics_core import Metric

from services.detector.decisions import limits_in_force
from services.detector.decisions.decision import DetectorLimits
from services.detector.state.cluster import DetectorState
from shared.messages.signals import Heartbeat, SignalBase
from shared.service.metrics import counter, gauge

logger = logging.getLogger(__name__)

BEHIND_S = 0.5
"""Longest round of reading that is no lag. A longer one has every fault found that much later: two heartbeats of an
agent pass."""

_SAID_EVERY_S = 60.0
"""Pause between two lines about the lag. Chosen: an overload that lasts fills no log, and whoever looks sees it within
a minute."""


class ReadingLag:
    """The newest round in which heartbeats were read.

    Attributes:
        seconds: how long the round took; the tick after it judges the moment at which the round began.
        skipped: heartbeats, since the start, that were not read since a newer one of their node had come.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.skipped = 0
        self._said_at_s = -_SAID_EVERY_S
        self._said = 0

    def note(self, seconds: float, skipped: int, at_s: float) -> None:
        """Take note of a round, and say once a minute that the detector is behind. ``at_s``: a monotonic time."""
        self.seconds, self.skipped = seconds, skipped
        if seconds > BEHIND_S and at_s - self._said_at_s >= _SAID_EVERY_S:
            logger.warning(
                "behind: the newest heartbeats of all nodes take %.1f s to read, and %d older ones were skipped; "
                "faults are found so much later, and no node is judged by what was not read",
                seconds,
                skipped - self._said,
            )
            self._said_at_s, self._said = at_s, skipped


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
