"""Pairs of nodes whose round trips are persistently several times those of the same nodes' other pairs. Pure.

The kernel measures the round trips of probes (``shared.messages.probes``): of probes that are made for other reasons,
and of a rare one between the nodes of near ranks of a task that trains (``due``). A node whose round trips are all long
has no slow link: the node itself is far away. A busy machine does not lengthen the kernel's round trips.

**False alarms.** Each of a pair's newest ``ROUND_TRIPS`` round trips has to be ``FACTOR`` times the median of the other
pairs of both nodes and longer by ``LEAST_EXCESS_S``. If one probe in a hundred meets a full queue by chance, three of a
pair in succession do once in a million probes; a pair has 1,440 rare ones a day.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from services.detector.state.pairs import Pair, pair

ROUND_TRIPS = 3
"""Number of round trips of a pair that have to agree."""

FACTOR = 4.0
"""Round trip over that of the nodes' other pairs: within a data centre hops and racks make a factor of 2 to 3."""

LEAST_EXCESS_S = 0.002
"""Shortest difference that counts: below it no collective is noticeably longer. A round trip in a data centre takes
0.02 to 0.5 ms."""

OTHERS = 2
"""Number of other pairs of the two nodes together, without which there is nothing to compare with: they need a third
node."""

COMPARED = 16
"""Most other pairs of each node that are compared with; more do not change their median much."""

PERIOD_S = 60.0
"""Interval of the rare probes of a pair: three connections a minute for each node and near rank."""

PAIRS = 4096
"""Pairs whose round trips are remembered; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link that has become slow, or is as fast as others again; seconds."""

    nodes: Pair
    round_trip_s: float
    expected_s: float
    ended: bool


@dataclass(slots=True)
class RoundTrips:
    """The newest round trips of pairs of nodes.

    Attributes:
        of: pair -> its newest round trips, seconds.
        pairs: node -> the nodes that it has pairs with, in the order of their first round trips.
        asked: task -> its generation, the time since which its rare probes are due, and how many of them were asked
            for.
    """

    of: dict[Pair, tuple[float, ...]] = field(default_factory=dict)
    pairs: dict[str, dict[str, None]] = field(default_factory=dict)
    asked: dict[str, tuple[int, float, int]] = field(default_factory=dict)

    def take(self, one: str, found_s: Mapping[str, float], known: frozenset[Pair]) -> list[SlowLink]:
        """Take the round trips between a node and others; return the links that have changed.

        Args:
            one: the node that has probed.
            found_s: other node -> round trip, seconds.
            known: links that are known to be slow.
        """
        for other, round_trip_s in found_s.items():
            self._add(pair(one, other), round_trip_s)
        links = (self._judge(pair(one, other), known) for other in found_s)
        return [link for link in links if link is not None]

    def _add(self, both: Pair, round_trip_s: float) -> None:
        while both not in self.of and len(self.of) >= PAIRS:
            first, second = oldest = next(iter(self.of))
            del self.of[oldest]
            self.pairs[first].pop(second, None)
            self.pairs[second].pop(first, None)
        self.of[both] = (*self.of.get(both, ()), round_trip_s)[-ROUND_TRIPS:]
        first, second = both
        self.pairs.setdefault(first, {})[second] = None
        self.pairs.setdefault(second, {})[first] = None

    def _judge(self, both: Pair, known: frozenset[Pair]) -> SlowLink | None:
        newest = self.of.get(both, ())
        others = [
            median(self.of[another])
            for node in both
            for another in itertools.islice((pair(node, other) for other in self.pairs.get(node, ())), COMPARED)
            if another != both and another not in known
        ]
        if len(newest) < ROUND_TRIPS or len(others) < OTHERS:
            return None
        usual_s = median(others)
        slow = [round_trip_s > max(FACTOR * usual_s, usual_s + LEAST_EXCESS_S) for round_trip_s in newest]
        if both in known:
            return None if any(slow) else SlowLink(both, median(newest), usual_s, ended=True)
        return SlowLink(both, median(newest), usual_s, ended=False) if all(slow) else None

    def due(self, task: str, generation: int, nodes: Sequence[str], at_s: float) -> list[Pair]:
        """Return the pairs of a task's nodes to be probed now: those of near ranks, each once in ``PERIOD_S``.

        The pairs are spread over the period. A task on fewer than three nodes has none.

        Args:
            task: its name.
            generation: its generation; the first period begins with it.
            nodes: in the order of their ranks.
            at_s: the present time, of a clock that only goes forward.
        """
        began = self.asked.get(task)
        if began is None or began[0] != generation:
            self.asked[task] = (generation, at_s, 0)
            return []
        if len(nodes) < OTHERS + 1:
            return []
        _, since_s, done = began
        wanted = int((at_s - since_s) / PERIOD_S * len(nodes))
        self.asked[task] = (generation, since_s, wanted)
        first = max(done, wanted - len(nodes))
        return [pair(nodes[turn % len(nodes)], nodes[(turn + 1) % len(nodes)]) for turn in range(first, wanted)]

    def forget(self, tasks: Mapping[str, object]) -> None:
        """Forget what was asked for tasks that are no more."""
        self.asked = {name: asked for name, asked in self.asked.items() if name in tasks}
