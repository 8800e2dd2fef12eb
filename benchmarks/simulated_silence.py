"""How often the detector would take a living node for lost, over simulated days of heartbeats.

The arrivals of each node's heartbeats are drawn: log-normal delays with autocorrelated slow phases and rare pauses, in
which the agent itself does not run (``agent_delays``), and repeated TCP segments (``network_delays``). They go through
the estimator that the detector uses (``services/detector/state/arrivals.py``). No node ever ends.

A silence beyond its limit is a *suspicion*, and a loss only if witnesses find nothing else. A living node's machine
takes their connections, so its agent is mute at worst: that counts beyond ``node_timeout_s`` and the limit, and only if
the agent did not run for all that time. Such silences are the *losses*. A segment that was lost delays the heartbeats
and keeps no witness from the agent.

    python -m benchmarks.simulated_silence [--nodes 1000] [--hours 24] [--seed 1]

prints one JSON line, and ends with exit status 1 if more nodes than ``ALLOWED`` would be lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.detector.main import limits as detector_limits
from services.detector.state.arrivals import REFRESH, WARM_UP, WINDOW
from services.detector.state.node import MonitoredNode
from shared.messages.signals import Heartbeat
from shared.settings.model import Settings

Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]

ALLOWED = 0.001
"""Losses per node and day that are allowed: one of 1,000 nodes a day."""

MEDIAN_S, DEVIATION = 0.002, 0.8
"""Log-normal delay of a heartbeat on a quiet machine: its median, and the standard deviation of its logarithm. Measured
were medians of 1.3-5 ms and longest delays of 6-16 ms in eight heartbeats."""

SLOW_MEDIAN_S, SLOW_DEVIATION = 0.08, 0.5
"""The same in a slow phase, on a busy machine: delays up to a second in days, the longest that were measured there."""

SLOW_EVERY_S, SLOW_S = 1800.0, 60.0
"""Mean time between two slow phases of a node, and mean duration of one: a job on the same machine."""

SEGMENT_LOST, SEGMENTS_LOST_SLOW = 1e-4, 1e-2
"""Part of the heartbeats whose TCP segment is lost and repeated after 0.2 s, and again after 0.4 s with the same
probability, and so on; the second value holds in slow phases."""

PAUSE_EVERY_S, PAUSE_S = 3600.0, 0.1
"""Mean time between two pauses of an agent beyond these delays (a page that is read back, a clock that is set), and the
mean duration of one (exponential)."""


@dataclass(frozen=True, slots=True)
class FalseLosses:
    """What was counted. Numbers of silences.

    Attributes:
        nodes: that were simulated.
        hours: of each.
        heartbeats: of all.
        lost: silences beyond limit and ``node_timeout_s`` in which the agent did not run.
        suspected: silences beyond the limit in force.
        fixed: silences beyond ``node_timeout_s``, which were suspicions before limits followed the arrivals.
        asked: silences longer than ``ask_s``, after which witnesses are asked whatever the limit.
        longest_s: the longest silence.
    """

    nodes: int
    hours: float
    heartbeats: int
    lost: int
    suspected: int
    fixed: int
    asked: int
    longest_s: float


def agent_delays(slow: Flags, interval_s: float, draw: np.random.Generator) -> Seconds:
    """Return by how much the agent sends each heartbeat too late, in seconds. ``slow``: heartbeats in slow phases."""
    late_s = draw.lognormal(np.log(MEDIAN_S), DEVIATION, len(slow))
    late_s[slow] = draw.lognormal(np.log(SLOW_MEDIAN_S), SLOW_DEVIATION, int(slow.sum()))
    pauses = draw.random(len(slow)) < interval_s / PAUSE_EVERY_S
    late_s[pauses] += draw.exponential(PAUSE_S, int(pauses.sum()))
    return late_s


def network_delays(slow: Flags, draw: np.random.Generator) -> Seconds:
    """Return for how long each heartbeat is on its way because its segment was lost, in seconds."""
    repeats = draw.geometric(1.0 - np.where(slow, SEGMENTS_LOST_SLOW, SEGMENT_LOST)) - 1
    return np.asarray(0.2 * (2.0**repeats - 1.0))


def slow_phases(count: int, interval_s: float, draw: np.random.Generator) -> Flags:
    """Return which of ``count`` heartbeats are in slow phases, whose gaps and durations are exponential."""
    slow = np.zeros(count, dtype=bool)
    at_s = draw.exponential(SLOW_EVERY_S)
    while (first := int(at_s / interval_s)) < count:
        length_s = draw.exponential(SLOW_S)
        slow[first : first + int(length_s / interval_s)] = True
        at_s += length_s + draw.exponential(SLOW_EVERY_S)
    return slow


def false_losses(nodes: int, hours: float, seed: int) -> FalseLosses:
    """Return how often living nodes are suspected, and how often they are lost.

    Args:
        nodes: number of nodes.
        hours: simulated time of each.
        seed: of the random numbers; equal seeds give equal results.
    """
    limits = detector_limits(Settings.model_construct()).silence
    interval_s = limits.heartbeat_interval_s
    count = int(hours * 3600.0 / interval_s)
    lost = suspected = fixed = asked = 0
    longest_s = 0.0
    for node in range(nodes):
        draw = np.random.default_rng([seed, node])
        slow = slow_phases(count, interval_s, draw)
        late_s = agent_delays(slow, interval_s, draw)
        sent_s = np.arange(count) * interval_s + late_s
        # A late heartbeat keeps back those behind it, as TCP does.
        found = np.diff(np.maximum.accumulate(sent_s + network_delays(slow, draw)))
        longest_s = max(longest_s, float(found.max()))
        fixed += int((found > limits.node_timeout_s).sum())
        asked += int((found > limits.ask_s).sum())
        # The limits are only computed where a silence may exceed them: the estimator is the detector's, and slow.
        for index in np.flatnonzero(found > limits.floor_s):
            limit_s = limits.of(_heard(found, int(index), interval_s)).limit_s
            suspected += int(found[index] > limit_s)
            mute_s = interval_s + late_s[index + 1]
            lost += int(mute_s > max(limits.node_timeout_s, limit_s))
    return FalseLosses(nodes, hours, nodes * count, lost, suspected, fixed, asked, longest_s)


def _heard(found: Seconds, before: int, interval_s: float) -> MonitoredNode:
    """Return a node that has been heard up to a gap, as the detector knows it."""
    node = MonitoredNode(name="n", incarnation="i", joined="j")
    node.heartbeat = Heartbeat(
        node="n", incarnation="i", agent_pid=1, sequence=1, sent_at=_START, interval_s=interval_s, workers=[]
    )
    # What is older than the window has been forgotten; bursts are not kept, so twice the window holds one at least.
    for gap_s in found[max(0, before - 2 * WINDOW - REFRESH) : before]:
        node.arrivals.note(float(gap_s), interval_s)
    return node


_START = datetime(2026, 1, 1, tzinfo=UTC)


def main() -> int:
    """Run the simulation; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    found = false_losses(arguments.nodes, arguments.hours, arguments.seed)
    allowed = ALLOWED * found.nodes * found.hours / 24.0
    line: dict[str, Any] = {"benchmark": "simulated-silence", "seed": arguments.seed, **asdict(found)}
    line |= {"bound": allowed, "ok": found.lost <= allowed, "warm_up": WARM_UP}
    print(json.dumps(line | {"took_s": round(time.perf_counter() - began_s, 1)}))
    return 0 if line["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
