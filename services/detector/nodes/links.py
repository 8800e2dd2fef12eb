"""Inquiries: before a fault is judged that a link may have caused, the nodes of its task probe one another. Pure.

A rank that cannot reach a peer looks like one that hangs, or like a collective that is stuck. So such a fault waits
until the nodes have answered (``probing.py``), at most for ``ANSWER_S`` in each round (``schedule``). ``pairs.py``
judges the answers of all rounds:

* A pair is broken in two inquiries in succession, of which the second one asks such pairs only, or was broken within
  ``isolation.MEMORY_S`` before: a side of it is isolated (``isolation.py``). The fault belongs to that incident.
* No pair is broken, and the ranks have stood still for less than ``ROUND_TRIPS`` of the slowest pair: the network is
  slow, and the ranks wait on.
* Ranks take long to join a generation, and it is not known how long that may take: they go on. * Otherwise the fault is
judged as if nobody had been asked. A pair that was broken in the first inquiry alone is noted
  in the evidence, so that it counts as broken before.

In an inquiry all pairs of a task's nodes are probed, the suspected ones first, in *rounds*: a listener must not be
overrun. In a task with more pairs than ``MAX_PAIRS``, an inquiry covers those that are suspected, and of the others as
many as it may, by the distance of their ranks; the next inquiry goes on with the farther ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from services.detector.incidents.faults import Fault
from services.detector.nodes import isolation, probing
from services.detector.nodes.probing import ProbeQuestion
from services.detector.state.cluster import DetectorState
from services.detector.state.pairs import Pair, broken_pairs, left_out, pair
from services.detector.state.task import MonitoredTask
from services.detector.state.unlogged import Inquiry
from shared.events.evidence import Evidence
from shared.events.union import ErrorDetected
from shared.messages.probes import PROBE_TIMEOUT_S, Outcome

ANSWER_S = PROBE_TIMEOUT_S + 1.1
"""How long to wait for answers: the time-out of a probe, the way of question and answer over NATS
(``services.detector.prober.REPLY_S``), and a tick."""

FRESH_S = 2 * ANSWER_S
"""Age from which an inquiry says nothing about the present. While ranks wait on in a slow network, their nodes are
asked again at this interval, so that a link that breaks meanwhile is found."""

SUSPICION_S = 15.0
"""Age from which an inquiry says nothing if ranks only take long to join: they may read a large state, and their nodes
are not to be disturbed."""

OTHER_WITNESSES = 8
"""Most nodes outside the task that are asked as well: more would not change what the majority says."""

ROUND_TRIPS = 100
"""Number of round trips for which ranks may stand still in a step while all pairs work. TCP repeats a segment that is
lost again and again after about 1.5, 3, 6, 12 and 24 round trips (RFC 6298: the smoothed round trip and four
deviations, doubled each time). With 5% loss, five losses of one segment in succession happen once in three million
segments; between two reports of progress a rank waits for several segments, one after the other."""

SETUP_ROUND_TRIPS = 300
"""Number of round trips of a pair while ranks join a generation. To make the groups of two ranks takes 86 round trips
in succession, and 120 with 5% loss (measured with a delay of 0.2 s in each direction: 34 s and 48 s)."""


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


@dataclass(slots=True)
class Examination:
    """What follows from a fault.

    Attributes:
        questions: nodes to ask; the fault is examined again once they have answered.
        errors: the nodes that are isolated.
        fault: the fault, if it is to be judged now.
    """

    questions: list[ProbeQuestion] = field(default_factory=list)
    errors: list[ErrorDetected] = field(default_factory=list)
    fault: Fault | None = None


def examine(state: DetectorState, task: MonitoredTask, fault: Fault | None, now: datetime) -> Examination:
    """Return what follows from a task's fault. A fault that no link can cause is judged at once.

    Args:
        state: the detector's.
        task: the task; it keeps its inquiry from call to call.
        fault: as found now. It is found again at every call, until it is judged or gone.
        now: the time.
    """
    if fault is None or not fault.by_peers:
        return Examination(fault=fault)
    needed = _nodes(state, task)
    if len(needed) < 2:
        return Examination(fault=fault if fault.certain else None)
    inquiry = task.inquiry
    if inquiry is None or (now - inquiry.asked_at).total_seconds() > (FRESH_S if fault.certain else SUSPICION_S):
        return Examination(_begin(state, task, needed, fault, now))
    if not _is_answered(state, inquiry) and (now - inquiry.asked_at).total_seconds() <= ANSWER_S:
        return Examination()
    if inquiry.waiting:
        return Examination(_ask(state, task, inquiry, now))
    reached, round_trip_s = _answers(state, inquiry)
    if reached:  # the second of two inquiries asks a few pairs only
        task.round_trip_s = max(round_trip_s, task.round_trip_s if inquiry.suspects else 0.0)
    broken = broken_pairs(reached)
    certain = {one for one in broken if one in inquiry.suspects or isolation.breaks(state, one, now)}
    if out := left_out(needed.keys(), certain, isolation.need(state)):
        task.inquiry = None
        return Examination(errors=[isolation.isolate(state, node, certain, fault, now) for node in out])
    if left_out(needed.keys(), broken, {}) and not inquiry.suspects:
        again = Inquiry(since=now, asked_at=now, waiting=tuple(sorted(broken)), suspects=broken)
        return Examination(_ask(state, task, again, now))
    waits_s = patience_s(task.round_trip_s, in_setup=fault.in_setup)
    if not fault.certain or (fault.stalled_s is not None and fault.stalled_s <= waits_s):
        return Examination()
    task.inquiry = None
    found = Evidence(pairs=sorted(inquiry.suspects)) if inquiry.suspects else Evidence()
    evidence = fault.evidence | found.mapping(round_trip_s=task.round_trip_s)
    return Examination(fault=replace(fault, evidence=evidence))


def patience_s(round_trip_s: float, *, in_setup: bool) -> float:
    """Return for how many seconds ranks may stand still in a network with this round trip, while all pairs work."""
    return round_trip_s * (SETUP_ROUND_TRIPS if in_setup else ROUND_TRIPS)


def _nodes(state: DetectorState, task: MonitoredTask) -> dict[str, int]:
    """Return node -> its lowest rank, of the nodes that the task's stage and its plan need and that can be asked."""
    ranks: dict[str, int] = {}
    for member in (*task.members.values(), *(member for stage in task.stages() for member in stage.members)):
        ranks[member.node] = min(member.rank, ranks.get(member.node, member.rank))
    return {node: ranks[node] for node in _available(state, ranks)}


def _available(state: DetectorState, names: Collection[str]) -> frozenset[str]:
    """Return those of the nodes that are neither lost nor isolated, and that can be asked."""
    return frozenset(
        name
        for name in names
        if name not in state.isolated and probing.can_probe(state, name) and state.nodes[name].present
    )


def _begin(
    state: DetectorState, task: MonitoredTask, needed: Mapping[str, int], fault: Fault, now: datetime
) -> list[ProbeQuestion]:
    """Begin an inquiry. The needed nodes probe one another; witnesses probe them and are probed by them."""
    nodes = sorted(needed, key=lambda node: (needed[node], node))
    remembered = [known for known in state.breaks if isolation.breaks(state, known, now)]
    pairs = schedule(nodes, _in_question(fault), remembered, task.inquiries)
    if len(nodes) <= PEERS:
        others = sorted(_available(state, state.nodes.keys()) - needed.keys())[:OTHER_WITNESSES]
        pairs += [pair(node, other) for node in nodes for other in others]
    task.inquiries += 1
    return _ask(state, task, Inquiry(since=now, asked_at=now, waiting=tuple(pairs)), now)


def _in_question(fault: Fault) -> list[str]:
    """Return the nodes that a fault names, with those first that it names first."""
    blamed = [fault.worker, *Evidence.read(fault.evidence).workers, *fault.evidence.get("broken_sockets_of", [])]
    return [worker.rpartition("/")[0] for worker in blamed if worker is not None]


def _ask(state: DetectorState, task: MonitoredTask, inquiry: Inquiry, now: datetime) -> list[ProbeQuestion]:
    """Ask the next round of an inquiry. Both nodes of a pair probe each other, since a broken one needs both sides."""
    asking, waiting = next_round(inquiry.waiting)
    peers: dict[str, list[str]] = {}
    for one, other in asking:
        peers.setdefault(one, []).append(other)
        peers.setdefault(other, []).append(one)
    questions = [question for node in sorted(peers) for question in probing.ask(state, [node], peers[node], now)]
    asked = frozenset((question.witness, peer) for question in questions for peer in question.peers)
    task.inquiry = replace(
        inquiry, asked_at=now, asked=asked, answered=inquiry.answered | inquiry.asked, waiting=tuple(waiting)
    )
    return questions


def _is_answered(state: DetectorState, inquiry: Inquiry) -> bool:
    """Return whether all have answered that were asked in the present round."""
    results = (state.probes.get(direction) for direction in inquiry.asked)
    return all(result is not None and result.asked_at >= inquiry.asked_at for result in results)


def _answers(state: DetectorState, inquiry: Inquiry) -> tuple[dict[tuple[str, str], bool], float]:
    """Return who has reached whom, and the longest round trip in seconds.

    A machine that answers is reached, whatever has become of its agent. Answers about a node that was isolated since,
    for another task for instance, are left out: its broken pairs are no evidence against the other side.
    """
    reached: dict[tuple[str, str], bool] = {}
    round_trip_s = 0.0
    for direction in inquiry.answered | inquiry.asked:
        result = state.probes.get(direction)
        if result is None or result.asked_at < inquiry.since or result.outcome is None:
            continue
        if not state.isolated.keys().isdisjoint(direction):
            continue
        reached[direction] = result.outcome is not Outcome.SILENT
        round_trip_s = max(round_trip_s, result.round_trip_s or 0.0)
    return reached, round_trip_s
