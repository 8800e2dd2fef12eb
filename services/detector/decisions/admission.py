"""Which agents may join: whether the name is free, and whether the nodes can reach one another. Pure.

An agent that starts asks before it does anything else (``shared/messages/admission.py``). Whether the agent that has
the name lives cannot be read from the log or from heartbeats alone: the shell (``main.py``) asks that agent, and passes
the outcome in with the same question.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from services.detector.decisions.status_events import node_joined
from services.detector.state.cluster import Admitted, DetectorState
from services.detector.state.node import MonitoredNode
from shared.errors import NameInUse, UnreachableAddress
from shared.messages.admission import Answer, Hello
from shared.messages.signals import Heartbeat

FIRST_HEARTBEATS = 2.0
"""After a start of the detector every living agent has been heard within this many heartbeat intervals. Chosen: one
interval, and another one for a busy machine."""

GIVEN_UP_FACTOR = 3.0
"""Multiple of ``node_timeout_s`` after which another machine may take the name of a silent node that nobody reaches. It
gives witnesses time to answer twice."""


_ADDRESSES = 65_536
"""Number of addresses of which it is remembered whether they are loopback: each hello looks at those of all nodes."""


class Liveness(StrEnum):
    """What came of the question to an agent whether it lives."""

    ANSWERED = "answered"
    GONE = "gone"
    """NATS has no connection of the agent."""
    SILENT = "silent"
    """NATS has a connection of the agent, and no answer came: the process is stopped, or the machine is lost."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The agent of this incarnation has to be asked first whether it lives. ``node``: that agent's node."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Patience:
    """The longest times that a doubt lasts.

    ``node_timeout_s``: after it, a silent node is lost. ``all_heard``: whether every living agent has been heard since
    the detector began to listen.
    """

    node_timeout_s: float
    all_heard: bool


class _Peer(NamedTuple):
    """A node that is in the cluster, or has been admitted."""

    name: str
    incarnation: str
    network: str
    addresses: Mapping[str, str]


def judge(
    state: DetectorState, hello: Hello, answers: Mapping[str, Liveness], patience: Patience, now: datetime
) -> Answer | Ask:
    """Return the answer to a hello, or which agent has to be asked first.

    Args:
        state: the detector's.
        hello: from the agent that starts.
        answers: incarnation -> outcome, of the agents that have been asked for this hello.
        patience: how long a doubt lasts.
        now: the time.
    """
    node, admitted = state.nodes.get(hello.node), state.admitted.get(hello.node)
    if node is not None and hello.incarnation in node.past:
        return _in_use(hello.node)
    if node is not None and node.present and is_successor(node, hello.supervisor):
        return _reach(state, hello, answers, patience)  # the agent's supervisor has seen its end before
    rivals = [admitted.hello.incarnation] if admitted is not None else []
    rivals += [node.incarnation] if node is not None else []
    for rival in rivals:
        if rival == hello.incarnation:
            continue
        if rival not in answers:
            return Ask(hello.node, rival)
        if answers[rival] is Liveness.ANSWERED:
            if node is not None and node.left and rival == node.incarnation:
                return _wait(f"the agent of node {hello.node} has left, and is still ending its processes")
            return _in_use(hello.node)
    if admitted is not None and _is_pending(admitted, hello, answers, patience, now):
        return _wait(f"an agent that was admitted as {hello.node} does not answer")
    if node is not None and not _is_given_up(node, patience, now) and _held(node, hello, answers, patience):
        return _wait(f"the agent of node {hello.node} does not answer, and does not count as lost yet")
    return _reach(state, hello, answers, patience)


def is_successor(node: MonitoredNode, supervisor: str) -> bool:
    """Return whether an agent with this supervisor was started in place of the node's present one, which has ended."""
    return bool(supervisor) and node.supervisor == supervisor


def may_join(state: DetectorState, heartbeat: Heartbeat) -> bool:
    """Return whether an agent that is not its node's present one may become that.

    An agent whose name was given to another agent may not, whether the other has joined or was only admitted so far.
    Nor may an incarnation that has joined before, as this node or as another one: the log would refuse its event.
    """
    admitted = state.admitted.get(heartbeat.node)
    if node_joined(heartbeat, heartbeat.incarnation, heartbeat.sent_at).event_id in state.joins:
        return False
    return admitted is None or admitted.hello.incarnation == heartbeat.incarnation


def _is_pending(
    admitted: Admitted, hello: Hello, answers: Mapping[str, Liveness], patience: Patience, now: datetime
) -> bool:
    """Return whether the name belongs to another agent that was admitted and has not sent a heartbeat yet."""
    if answers.get(admitted.hello.incarnation) is not Liveness.SILENT:
        return False
    return (now - admitted.at).total_seconds() <= patience.node_timeout_s


def _held(node: MonitoredNode, hello: Hello, answers: Mapping[str, Liveness], patience: Patience) -> bool:
    """Return whether the present agent of the name, which does not answer, may still be alive.

    An agent of the same machine that has no connection to NATS has ended: its successor joins at once. On another
    machine the agent may be cut off from NATS: the name is free once the node is lost.
    """
    if node.incarnation == hello.incarnation or not node.present:
        return False
    if answers.get(node.incarnation) is Liveness.SILENT:
        return True
    if node.heartbeat is None and not (patience.all_heard and node.network):
        return not patience.all_heard
    return node.network != hello.network


def _is_given_up(node: MonitoredNode, patience: Patience, now: datetime) -> bool:
    """Return whether a node that is silent, and that no witness reaches, leaves its name to another machine.

    Where nothing can show that a node is lost (``silence.py``), a machine that replaces it would wait for ever.
    """
    if node.unreachable_since is None:
        return False
    known_at = max(at for at in (node.unreachable_since, node.reached_at) if at is not None)
    return (now - known_at).total_seconds() > GIVEN_UP_FACTOR * patience.node_timeout_s


def _reach(state: DetectorState, hello: Hello, answers: Mapping[str, Liveness], patience: Patience) -> Answer | Ask:
    """Refuse an agent that peers cannot reach, or that cannot reach a peer, because of a loopback address."""
    mine = _loopback(hello.addresses)
    for peer in _peers(state, hello.node):
        if peer is None:
            if not patience.all_heard:
                return _wait("nodes of the cluster have not been heard yet")
        elif peer.network != hello.network and (mine or any(map(_is_loopback, peer.addresses.values()))):
            # A peer that has ended is no reason to refuse: its node may not count as lost yet, or the peer never
            # joined.
            match answers.get(peer.incarnation):
                case None:
                    return Ask(peer.name, peer.incarnation)
                case Liveness.ANSWERED:
                    return _refused(UnreachableAddress.code, _text(hello.node, mine, peer))
                case Liveness.SILENT:
                    return _wait(f"node {peer.name}, which cannot reach {hello.node} or be reached, does not answer")
                case Liveness.GONE:
                    pass
    return Answer(verdict="admitted")


def _peers(state: DetectorState, name: str) -> Iterator[_Peer | None]:
    """Yield the other nodes that count as alive; None for a node that has not been heard yet."""
    for other, admitted in state.admitted.items():
        if other != name:
            hello = admitted.hello
            yield _Peer(other, hello.incarnation, hello.network, hello.addresses)
    for node in state.nodes.values():
        if node.name != name and node.present:
            beat = node.heartbeat
            if beat is None:
                yield None
            elif beat.addresses:
                yield _Peer(node.name, node.incarnation, beat.network, beat.addresses)


def _loopback(addresses: Mapping[str, str]) -> dict[str, str]:
    return {setting: ip for setting, ip in addresses.items() if _is_loopback(ip)}


@lru_cache(_ADDRESSES)
def _is_loopback(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:
        return False


def _text(name: str, mine: Mapping[str, str], peer: _Peer) -> str:
    if mine:
        setting, ip = next(iter(mine.items()))
        others = " and ".join(sorted(set(peer.addresses.values())))
        return (
            f"node {name} would advertise the loopback address {ip}, which node {peer.name} ({others}) on another "
            f"machine cannot reach: {_advice(setting)} on {name}"
        )
    setting, ip = next(iter(_loopback(peer.addresses).items()))
    return (
        f"node {peer.name} on another machine advertises the loopback address {ip}, which node {name} cannot reach: "
        f"{_advice(setting)} on {peer.name} and start its agent again"
    )


def _advice(setting: str) -> str:
    return f"set UNICRON_{setting.upper()} to an address that the other nodes reach"


def _in_use(name: str) -> Answer:
    return _refused(
        NameInUse.code,
        f"the node name {name} is in use by another agent that is alive: set UNICRON_NODE to a free name",
    )


def _refused(code: str, detail: str) -> Answer:
    return Answer(verdict="refused", code=code, detail=detail)


def _wait(detail: str) -> Answer:
    return Answer(verdict="wait", detail=detail)
