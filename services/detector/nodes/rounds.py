"""Which nodes probe one another in an inquiry, in which order, and how many pairs at a time. Pure.

All pairs of a task's nodes are probed, the suspected ones first, in *rounds*: a listener must not be overrun. In a task
with more pairs than ``MAX_PAIRS``, an inquiry covers those that are suspected, and of the others as many as it may, by
the distance of their ranks; the next inquiry goes on with the farther ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from services.detector.state.pairs import Pair, pair

PEERS = 32
"""Most nodes that one node probes in a round, and by which it is probed. A probe opens three connections at once, and
the queue of a listener has 100 places: a connection that finds no place looks like a broken link."""

MAX_PAIRS = 2**15
"""Most pairs of an inquiry, unless one round has more: all pairs of 256 nodes. Their answers take the detector about 1
s of processor time, in nine rounds (measured on busy cores); with more pairs, faults of other tasks would wait for too
long."""

IN_QUESTION = 16
"""Most nodes of which each pair is suspected: those that the fault names first. Nodes that it names later have merely
lost their peers to the fault of the earlier ones."""


def schedule(nodes: Sequence[str], in_question: Iterable[str], remembered: Iterable[Pair], turn: int) -> list[Pair]:
    """Return the pairs of an inquiry, the most suspected first; none occurs twice.

    Args:
        nodes: the task's nodes, in the order of their ranks. Collectives are made of messages between near ranks: the
            neighbours of a ring, and the members of a group with consecutive ranks.
        in_question: nodes that the fault names; others than ``nodes`` are left out.
        remembered: pairs that were broken before; with other nodes than ``nodes`` they are left out.
        turn: number of the inquiries before this one; only tasks with too many pairs differ by it.
    """
    among = frozenset(nodes)
    named = [node for node in dict.fromkeys(in_question) if node in among][:IN_QUESTION]
    suspected = [known for known in remembered if among.issuperset(known)]
    suspected += [pair(*two) for two in itertools.combinations(named, 2)]
    near = (
        pair(node, nodes[(place + distance) % len(nodes)])
        for distance in _distances(len(nodes), turn)
        for place, node in enumerate(nodes)
    )
    return list(dict.fromkeys(itertools.chain(suspected, near)))


def next_round(pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs that can be probed now, and those that wait: each node has at most ``PEERS`` at a time."""
    places: Counter[str] = Counter()
    now: list[Pair] = []
    later: list[Pair] = []
    for one, other in pairs:
        if places[one] < PEERS and places[other] < PEERS:
            places.update((one, other))
            now.append((one, other))
        else:
            later.append((one, other))
    return now, later


def _distances(count: int, turn: int) -> list[int]:
    """Return the distances, in a circle of ``count`` nodes, of the pairs to probe: all, or those of the turn."""
    reach = count // 2
    at_a_time = min(reach, max(PEERS // 2, MAX_PAIRS // max(1, count)))
    return [(turn * at_a_time + step) % reach + 1 for step in range(at_a_time)]
