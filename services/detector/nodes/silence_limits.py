"""For how long a node may be silent: when witnesses are asked, and when the silence counts. Pure.

Both times follow from how late the node's heartbeats have come (``arrivals.py``), within hard bounds: a quiet network
finds a dead node sooner, and a node whose heartbeats come late is given more time, but never any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from services.detector.state.arrivals import Arrivals
from services.detector.state.node import MonitoredNode
from services.detector.state.stalls import StallLimits
from shared.messages.probes import PROBE_TIMEOUT_S

ASK_FRACTION = 0.25
"""Witnesses are asked about a node once it has been silent for this part of ``node_timeout_s``, and again at this
interval. With ``PROBE_FRACTION`` the first answers are there before the time-out, so that witnesses delay no loss."""

PROBE_FRACTION = 2 / 3
"""Time-out of a probe, as a part of ``node_timeout_s``: 1 s of 1.5 s (``PROBE_TIMEOUT_S`` has the reason), and at most
that."""

OVERDUE_INTERVALS = 1.5
"""Heartbeat intervals after which a node counts as silent at the earliest, until its heartbeats are known: one, and a
half for a busy machine."""

QUIET_INTERVALS = 1.2
"""Heartbeat intervals after which a node counts as silent at the earliest, once its heartbeats are known to be even. A
heartbeat is late by a few milliseconds then; with the interval of the search (0.1 s) and the probe, an agent that has
ended is found within 0.5 s."""

ASK_PHI = 4.0
"""Phi from which witnesses are asked: one heartbeat in 10,000 comes so late. 1,000 nodes with four
heartbeats a second make one such question in 2.5 s, which costs a few packets."""

LATEST_ASK_FRACTION = 1 / 3
"""Witnesses are asked about any node after this part of ``node_timeout_s`` at the latest: 0.5 s of 1.5 s. With
``PROBE_FRACTION`` their answers are there when the time-out passes."""

SILENCE_PHI = 10.0
"""Phi from which silence counts. 1,000 nodes with four heartbeats a second send 3.5e8 a day, of which
0.03 are so late by the estimate; and no node is lost by its silence alone, while others can be asked."""

FLOOR_FRACTION = 0.8
"""The silence of no node counts before this part of ``node_timeout_s``: 1.2 s of 1.5 s. A heartbeat whose TCP segment
is lost twice in succession comes 0.6 s late (time-outs of 0.2 s and 0.4 s, RFC 6298 with Linux's least), 0.85 s after
the one before it, on the quietest network; and a link that is down for a second does not mean a lost node."""

BOUND_FACTOR = 2.0
"""The silence of every node counts after this multiple of ``node_timeout_s``, 3 s, however late its heartbeats come: a
loss may be found late, but is always found."""

SPEAKS_FRACTION = 0.5
"""A node speaks if it was heard within this part of ``node_timeout_s``. When nodes fall silent together, none of them
speaks any more by the time the first one reaches the time-out."""

Source = Literal["warm-up", "floor", "accrual", "bound"]
"""What a limit comes from: the setting, while too few heartbeats are known; a hard bound; or the estimate."""


@dataclass(frozen=True, slots=True)
class SilenceLimit:
    """How long one node may be silent.

    Attributes:
        ask_s: silence after which witnesses are asked.
        limit_s: silence that counts.
        source: what ``limit_s`` comes from.
    """

    ask_s: float
    limit_s: float
    source: Source


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Thresholds, and the detector's own place.

    Attributes:
        heartbeat_interval_s: the agents' interval.
        node_timeout_s: silence after which a node is lost or unreachable, until its heartbeats are known.
        stalls: thresholds for ranks that stand still.
        network: the detector's network stack (``shared.machine.network``).
    """

    heartbeat_interval_s: float
    node_timeout_s: float
    stalls: StallLimits
    network: str = ""

    @property
    def ask_s(self) -> float:
        """Silence after which an unknown node is asked about, and the interval between two questions."""
        return max(ASK_FRACTION * self.node_timeout_s, OVERDUE_INTERVALS * self.heartbeat_interval_s)

    @property
    def speaks_s(self) -> float:
        """Silence up to which a node speaks."""
        return max(SPEAKS_FRACTION * self.node_timeout_s, self.ask_s)

    @property
    def probe_timeout_s(self) -> float:
        """Time-out of a probe."""
        return min(PROBE_FRACTION * self.node_timeout_s, PROBE_TIMEOUT_S)

    @property
    def floor_s(self) -> float:
        """Silence that counts for no node."""
        return max(FLOOR_FRACTION * self.node_timeout_s, OVERDUE_INTERVALS * self.heartbeat_interval_s)

    @property
    def bound_s(self) -> float:
        """Silence that counts for every node."""
        return BOUND_FACTOR * self.node_timeout_s

    def earliest_s(self, node: MonitoredNode) -> float:
        """Silence before which nobody is asked about a node."""
        interval_s = node.heartbeat.interval_s if node.heartbeat is not None else self.heartbeat_interval_s
        return QUIET_INTERVALS * interval_s

    def of(self, node: MonitoredNode) -> SilenceLimit:
        """Return the limits of a node."""
        arrivals = node.arrivals
        if not arrivals.warm:
            return SilenceLimit(self.ask_s, self.node_timeout_s, "warm-up")
        earliest_s = self.earliest_s(node)
        latest_s = max(earliest_s, LATEST_ASK_FRACTION * self.node_timeout_s)
        ask_s = min(max(arrivals.silence_s(ASK_PHI), earliest_s), latest_s)
        estimate_s = arrivals.silence_s(SILENCE_PHI)
        if estimate_s < self.floor_s:
            return SilenceLimit(ask_s, self.floor_s, "floor")
        if estimate_s > self.bound_s:
            return SilenceLimit(ask_s, self.bound_s, "bound")
        return SilenceLimit(ask_s, estimate_s, "accrual")


def evidence(arrivals: Arrivals, silence_s: float) -> dict[str, Any]:
    """Return what the evidence of a lost node says of the heartbeats that its limit follows from, if any are known."""
    known = {"phi": round(arrivals.phi(silence_s), 2), "longest_delay_s": arrivals.longest_s}
    return {"limit_samples": arrivals.samples, **(known if arrivals.samples else {})}
