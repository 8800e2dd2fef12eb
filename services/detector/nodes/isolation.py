"""Nodes that are left out because of a broken link: how long, and what brings them back. Pure.

An isolated node is alive: its heartbeats arrive, and its agent takes commands. It returns (``node.joined``) once it has
reached every other usable node of its kind without a failure for ``RETURN_S``, doubled for each further break of one of
its pairs that is remembered (``MEMORY_S``): a link that flaps costs the cluster less and less often.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from services.detector.incidents.faults import METHOD, SERVICE, Fault
from services.detector.nodes import probing
from services.detector.nodes.probing import ProbeQuestion
from services.detector.state.cluster import DetectorState
from services.detector.state.node import MonitoredNode
from services.detector.state.pairs import Pair
from services.detector.state.unlogged import Isolation
from shared.events.evidence import Evidence
from shared.events.severities import SEVERITY, ErrorKind
from shared.events.union import ErrorDetected, derived_id
from shared.messages.probes import Outcome, ProbeTarget

RETURN_S = 5.0
"""For how long the links of an isolated node must work before it returns: several probes in succession, and little
beside the seconds that its return and another isolation would cost."""

RETURN_MAX_S = 900.0
"""Longest time for which links must work. An operator looks at a link that has broken eight times within an hour."""

MEMORY_S = 3600.0
"""For how long a break is remembered. A link that flaps because of a bad cable or an overloaded switch does so many
times within an hour."""

PROBE_INTERVAL_S = 1.0
"""Interval at which an isolated node probes the others, or longer where there are many."""

PROBES_PER_S = 100.0
"""Most nodes that an isolated node probes each second: a small load for its agent."""


def isolate(state: DetectorState, node: str, broken: Collection[Pair], fault: Fault, now: datetime) -> ErrorDetected:
    """Return the error event that isolates a node.

    Args:
        state: the detector's.
        node: the node.
        broken: the broken pairs.
        fault: the fault that made the detector ask.
        now: the time.
    """
    monitored = state.nodes[node]
    event_id = derived_id(monitored.joined, SERVICE, "isolated")
    pairs = sorted(pair for pair in broken if node in pair)
    evidence = Evidence(incarnation=monitored.incarnation, tasks=state.lost_ranks(monitored), pairs=pairs)
    others = ", ".join(other for pair in pairs for other in pair if other != node)
    return ErrorDetected(
        event_id=event_id,
        occurred_at=min(fault.occurred_at, now),
        incident=event_id,
        kind=ErrorKind.BROKEN_LINK,
        severity=SEVERITY[ErrorKind.BROKEN_LINK],
        method=METHOD[ErrorKind.BROKEN_LINK],
        detected_at=now,
        node=node,
        evidence=evidence.mapping(
            reason=f"{node} and {others} do not reach one another, as both sides say",
            found_by=fault.kind.value,
            return_after_s=return_after_s(state, pairs, now, further=1),
        ),
    )


def need(state: DetectorState) -> dict[str, float]:
    """Return how much the present plans need each node: its workers in tasks, by the weight of the task."""
    needed: dict[str, float] = {}
    for task in state.tasks.values():
        for member in task.members.values():
            needed[member.node] = needed.get(member.node, 0.0) + task.weight
    return needed


def breaks(state: DetectorState, pair: Pair, now: datetime) -> int:
    """Return how many breaks of a pair are remembered."""
    return sum((now - at).total_seconds() <= MEMORY_S for at in state.breaks.get(pair, ()))


def forget_breaks(state: DetectorState, pair: Pair, now: datetime) -> None:
    """Drop the breaks of a pair that are no longer remembered."""
    state.breaks[pair] = [at for at in state.breaks[pair] if (now - at).total_seconds() <= MEMORY_S]
    if not state.breaks[pair]:
        del state.breaks[pair]


def return_after_s(state: DetectorState, pairs: Collection[Pair], now: datetime, *, further: int = 0) -> float:
    """Return for how long the links of a node with these broken pairs must work before it returns, in seconds.

    ``further``: breaks that are not folded yet.
    """
    times = max((breaks(state, pair, now) for pair in pairs), default=0) + further
    return float(min(RETURN_S * 2 ** max(0, times - 1), RETURN_MAX_S))


def ask(state: DetectorState, now: datetime) -> list[ProbeQuestion]:
    """Return the questions to isolated nodes whether their links work, as far as they are due."""
    questions: list[ProbeQuestion] = []
    for name, isolation in state.isolated.items():
        if isolation.until_returned:
            continue
        peers = _peers(state, name)
        interval_s = max(PROBE_INTERVAL_S, len(peers) / PROBES_PER_S)
        if isolation.asked_at is None or (now - isolation.asked_at).total_seconds() >= interval_s:
            isolation.asked_at = now
            questions += probing.ask(state, [name], peers, now)
    return questions


def cause(state: DetectorState, node: MonitoredNode) -> str | None:
    """Return the id of the error event because of which a node is left out; None if the node is in use."""
    isolation = state.isolated.get(node.name)
    return isolation.error if isolation is not None else node.lost


def may_return(state: DetectorState, name: str, *, new_agent: bool = False) -> bool:
    """Return whether a node is not isolated, or has reached all usable nodes of its kind for long enough.

    A node that is isolated because of a device waits until a user returns it, or starts its agent anew: a device can be
    reset only while no agent has it open, and an agent looks at the devices as it starts.

    Nodes that have not been heard or are too old to be probed are left out, so the last node of a cluster returns.
    """
    if state.is_held_by_device(name) and not new_agent:
        return False
    isolation = state.isolated.get(name)
    if isolation is None or isolation.until_returned:
        return isolation is None
    return all([_has_proven(state, isolation, name, peer) for peer in _peers(state, name)])


def _has_proven(state: DetectorState, isolation: Isolation, name: str, peer: str) -> bool:
    """Return whether an isolated node has reached a peer for long enough; a failure begins the time anew."""
    result = state.probes.get((name, peer))
    if result is None or result.asked_at <= isolation.since:
        return False
    if result.outcome is Outcome.SILENT:
        isolation.whole_since.pop(peer, None)
    elif result.outcome is not None:
        since = isolation.whole_since.setdefault(peer, result.asked_at)
        return (result.asked_at - since).total_seconds() >= isolation.return_after_s
    return False


def _peers(state: DetectorState, name: str) -> list[str]:
    """Return the nodes that an isolated node has to reach: those in use that can be probed and are of its kind.

    A task runs on workers of one kind, and networks need not connect kinds with one another.
    """
    return sorted(
        peer
        for peer, node in state.nodes.items()
        if peer != name
        and node.present
        and peer not in state.isolated
        and probing.can_probe(state, peer)
        and _kind(state, peer) == _kind(state, name)
    )


def targets(state: DetectorState, name: str) -> dict[str, ProbeTarget]:
    """Return how to reach the usable nodes of an isolated node's kind, without those that another error isolated."""
    found = {peer: probing.target(state, peer) for peer in _peers(state, name) if peer not in state.condemned}
    return {peer: target for peer, target in found.items() if target is not None}


def _kind(state: DetectorState, name: str) -> str | None:
    node = state.nodes.get(name)
    return node.heartbeat.hardware if node is not None and node.heartbeat is not None else None
