"""Requests to probe, and what is known from them: which witness reaches which agent. Pure.

A rule that needs to know (``silence.py``) puts the questions of ``ask`` into its decision; the shell (``main.py``) has
them answered, and passes each answer in with its time (``inputs.Probed``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from services.detector.state.cluster import DetectorState
from services.detector.state.unlogged import ProbeResult
from shared.messages.probes import PROBE_TIMEOUT_S, Outcome, ProbeTarget

DETECTOR = "@detector"
"""The name under which the detector itself is a witness. No node has such a name."""


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """A request to a witness: probe these nodes.

    Attributes:
        witness: a node, or ``DETECTOR``.
        peers: node -> whom to probe.
        asked_at: when the question was put.
        timeout_s: the time for connection and line of each probe.
    """

    witness: str
    peers: Mapping[str, ProbeTarget]
    asked_at: datetime
    timeout_s: float


def ask(
    state: DetectorState,
    witnesses: Iterable[str],
    peers: Iterable[str],
    now: datetime,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> list[ProbeQuestion]:
    """Note and return the questions to the witnesses about the peers.

    Nodes of an older version, which can neither be asked nor be probed, and a witness's own node are left out.
    """
    targets = {name: found for name in peers if (found := target(state, name)) is not None}
    questions = []
    for witness in witnesses:
        asked = {name: target for name, target in targets.items() if name != witness}
        if asked and can_probe(state, witness):
            for name in asked:
                state.nodes[name].witnesses[witness] = now
            questions.append(ProbeQuestion(witness, asked, now, timeout_s))
    return questions


def can_probe(state: DetectorState, witness: str) -> bool:
    """Return whether a witness can be asked to probe: an agent that answers probes also knows requests to probe."""
    node = state.nodes.get(witness)
    return witness == DETECTOR or (node is not None and bool(node.probe))


def take(
    state: DetectorState,
    question: ProbeQuestion,
    outcomes: Mapping[str, Outcome],
    now: datetime,
    round_trips_s: Mapping[str, float],
) -> None:
    """Note the answer to a question. If the witness did not find out about a node, ``outcomes`` has no entry for it."""
    for peer, target in question.peers.items():
        node = state.nodes.get(peer)
        if node is None or node.incarnation != target.incarnation:
            continue
        node.witnesses.setdefault(question.witness, question.asked_at)
        known = state.probes.get((question.witness, peer))
        if known is None or known.asked_at <= question.asked_at:
            state.probes[question.witness, peer] = ProbeResult(
                outcomes.get(peer), question.asked_at, now, round_trips_s.get(peer)
            )
        if outcomes.get(peer) is Outcome.REACHED:
            at = question.asked_at
            node.reached_at = at if node.reached_at is None else max(at, node.reached_at)


def results(state: DetectorState, peer: str, since: datetime) -> dict[str, Outcome | None]:
    """Return witness -> outcome, of the newest questions about a node that were put after ``since`` and answered.

    None: the witness did not answer, or found nothing out.
    """
    node = state.nodes.get(peer)
    found = {w: state.probes.get((w, peer)) for w in (node.witnesses if node is not None else ())}
    return {w: result.outcome for w, result in found.items() if result is not None and result.asked_at > since}


def is_pending(state: DetectorState, witness: str, peer: str, since: datetime) -> bool:
    """Return whether a witness was asked about a node after ``since``, and has not answered any such question yet."""
    asked_at = state.nodes[peer].witnesses.get(witness)
    return asked_at is not None and asked_at > since and witness not in results(state, peer, since)


def target(state: DetectorState, name: str) -> ProbeTarget | None:
    """Return how to probe a node; None if neither the log nor a heartbeat says where its agent answers."""
    node = state.nodes.get(name)
    if node is None or not node.probe:
        return None
    return ProbeTarget(address=node.probe, incarnation=node.incarnation)
