"""Inquiries: before a fault is judged that a link may have caused, the nodes of its task probe one another. Pure.

A rank that cannot reach a peer looks like one that hangs, or like a collective that is stuck. So such a fault waits
until the nodes have answered (``probing.py``), at most for ``ANSWER_S``. ``pairs.py`` judges the answers:

* A pair is broken in two inquiries in succession, or was broken within ``isolation.MEMORY_S`` before: a side of it is
  isolated (``isolation.py``). The fault belongs to that incident.
* No pair is broken, and the ranks have stood still for less than ``ROUND_TRIPS`` of the slowest pair: the network is
  slow, and the ranks wait on.
* Ranks join a generation for long, and nothing is known of how long that may take: they go on.
* Otherwise the fault is judged as if nobody had been asked. A pair that was broken in the first inquiry alone is noted
  in the evidence, so that it counts as broken before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime

from services.detector import isolation, probing
from services.detector.faults import Fault
from services.detector.pairs import Pair, broken_pairs, left_out
from services.detector.probing import ProbeQuestion
from services.detector.state import DetectorState, Inquiry, MonitoredTask
from shared.events import ErrorDetected
from shared.evidence import Evidence
from shared.probes import PROBE_TIMEOUT_S, Outcome

ANSWER_S = PROBE_TIMEOUT_S + 1.1
"""How long answers are waited for: the time-out of a probe, the way of question and answer over NATS
(``services.detector.main.PROBE_REPLY_S``), and a tick."""

FRESH_S = 2 * ANSWER_S
"""Age at which an inquiry says nothing about now. While ranks wait on in a slow network, their nodes are asked again at
this interval, so that a link that breaks meanwhile is found."""

SUSPICION_S = 15.0
"""The same where ranks only join for long: they may read a large state, and their nodes are not to be disturbed."""

OTHER_WITNESSES = 8
"""Nodes without a part in the task that are asked as well, at most: more do not change what most say."""

PEERS = 24
"""Nodes of the task that one node probes in an inquiry, at most, and by which it is probed. A probe opens three
connections at once, other witnesses probe as well, and the queue of a listener has 100 places: what finds no place
looks like a broken link."""

ROUND_TRIPS = 100
"""Round trips for which ranks may stand still in a step while all pairs work. TCP repeats a segment that is lost again
and again after about 1.5, 3, 6, 12 and 24 round trips (RFC 6298: the smoothed round trip and four deviations, doubled
each time). With 5% loss, five losses of one segment in succession happen once in three million segments; between two
reports of progress a rank waits for several segments, one after the other."""

SETUP_ROUND_TRIPS = 300
"""The same while ranks join a generation. Making the groups of two ranks takes 86 round trips in succession, and 120
with 5% loss (measured with a delay of 0.2 s in each direction: 34 s and 48 s)."""


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
        return Examination(_ask(state, task, needed, now))
    if not _is_answered(state, inquiry) and (now - inquiry.asked_at).total_seconds() <= ANSWER_S:
        return Examination()
    reached, round_trip_s = _answers(state, inquiry)
    if reached:
        task.round_trip_s = round_trip_s
    broken = broken_pairs(reached)
    certain = {pair for pair in broken if pair in inquiry.suspects or isolation.breaks(state, pair, now)}
    if out := left_out(needed, certain, isolation.need(state)):
        task.inquiry = None
        return Examination(errors=[isolation.isolate(state, node, certain, fault, now) for node in out])
    if left_out(needed, broken, {}) and not inquiry.suspects:
        return Examination(_ask(state, task, needed, now, suspects=broken))
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


def _nodes(state: DetectorState, task: MonitoredTask) -> frozenset[str]:
    """Return the nodes that the task's present stage and its plan need, and that can be asked."""
    workers = {*task.members, *(member.worker for stage in task.stages() for member in stage.members)}
    return _available(state, {worker.rpartition("/")[0] for worker in workers})


def _available(state: DetectorState, names: Collection[str]) -> frozenset[str]:
    """Return those of the nodes that are neither lost nor isolated, and that can be asked."""
    return frozenset(
        name
        for name in names
        if name not in state.isolated and probing.can_probe(state, name) and state.nodes[name].present
    )


def _ask(
    state: DetectorState,
    task: MonitoredTask,
    needed: frozenset[str],
    now: datetime,
    suspects: frozenset[Pair] = frozenset(),
) -> list[ProbeQuestion]:
    """Begin an inquiry. The needed nodes probe one another; witnesses probe them and are probed by them.

    The second of two inquiries in succession puts the questions of the first.
    """
    nodes = sorted(needed)
    if not suspects:
        task.inquiries += 1
    others = sorted(_available(state, state.nodes.keys()) - needed)[:OTHER_WITNESSES] if len(nodes) <= PEERS else []
    questions: list[ProbeQuestion] = []
    for place, node in enumerate(nodes):
        peers = [nodes[i] for i in peers_of(place, len(nodes), task.inquiries - 1)]
        questions += probing.ask(state, [node], [*peers, *others], now)
    questions += probing.ask(state, others, nodes, now)
    asked = frozenset((question.witness, peer) for question in questions for peer in question.peers)
    task.inquiry = Inquiry(now, asked, suspects)
    return questions


def peers_of(place: int, count: int, turn: int) -> list[int]:
    """Return the places of the nodes that a node probes in the ``turn``-th inquiry, of ``count`` nodes in a circle.

    Up to ``PEERS`` others are all of them. Of more, the nearest on both sides come first, then the next in each further
    inquiry, and after the farthest the nearest again. Two nodes always probe each other, so that a pair has two sides.
    """
    if count - 1 <= PEERS:
        return [other for other in range(count) if other != place]
    reach, half = count // 2, PEERS // 2
    distances = {(turn * half + step) % reach + 1 for step in range(half)}
    return sorted({(place + sign * distance) % count for distance in distances for sign in (-1, 1)})


def _is_answered(state: DetectorState, inquiry: Inquiry) -> bool:
    """Return whether all have answered."""
    results = (state.probes.get(direction) for direction in inquiry.asked)
    return all(result is not None and result.asked_at >= inquiry.asked_at for result in results)


def _answers(state: DetectorState, inquiry: Inquiry) -> tuple[dict[tuple[str, str], bool], float]:
    """Return who has reached whom, and the longest round trip in seconds.

    A machine that answers is reached, whatever has become of its agent. Left out is what concerns a node that was
    isolated since, as for another task: its broken pairs are no evidence against the other side.
    """
    reached: dict[tuple[str, str], bool] = {}
    round_trip_s = 0.0
    for direction in inquiry.asked:
        result = state.probes.get(direction)
        if result is None or result.asked_at < inquiry.asked_at or result.outcome is None:
            continue
        if not state.isolated.keys().isdisjoint(direction):
            continue
        reached[direction] = result.outcome is not Outcome.SILENT
        round_trip_s = max(round_trip_s, result.round_trip_s or 0.0)
    return reached, round_trip_s
