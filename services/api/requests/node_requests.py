"""What a user asks of a node: to take no new work, to be emptied, to be used again.

Each request is one event of the node's stream. A request that the node's state answers already changes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from services.api.access.access import Actor
from services.api.gateway import Gateway
from services.api.store.tables import NODES
from shared.errors import Conflict, Unavailable
from shared.events.node_events import CheckResult
from shared.events.union import NodeCordoned, NodeDraining, NodeReported, NodeReturned
from shared.messages.admission import AGENT_RESTART, AgentRestart
from shared.messages.probes import ProbeTarget
from shared.messages.self_test import run_self_test
from shared.model import utc_now
from shared.projections.nodes import AWAY
from shared.views.documents import NodeState, NodeView

NodeEvent = NodeCordoned | NodeDraining | NodeReturned | NodeReported

Judge = Callable[[NodeView], Awaitable[NodeEvent | None]]
"""Returns the event that a request on a node in this state makes; None if there is nothing to do."""


async def cordon(api: Gateway, name: str, who: Actor, reason: str) -> NodeView:
    """Have no new work placed on the node; what runs there stays.

    Raises:
        NotFound: there is no such node.
    """

    async def judge(node: NodeView) -> NodeEvent | None:
        if node.cordoned:
            return None
        return NodeCordoned(event_id=str(uuid.uuid4()), occurred_at=utc_now(), node=name, reason=reason, actor=who.name)

    return await request(api, name, judge)


async def drain(api: Gateway, name: str, who: Actor, reason: str, timeout_s: float | None) -> NodeView:
    """Have the node emptied: what can move within ``timeout_s`` moves, the rest saves its state and waits.

    Args:
        api: the gateway.
        name: of the node.
        who: asks for it.
        reason: in words, for people.
        timeout_s: seconds; None: the setting ``drain_timeout_s``.

    Raises:
        NotFound: there is no such node.
        Conflict: the node has nothing that could move: it is lost or isolated, or has left.
    """
    allowed_s = api.settings.drain_timeout_s if timeout_s is None else timeout_s

    async def judge(node: NodeView) -> NodeEvent | None:
        if node.state in AWAY or node.state is NodeState.ISOLATED:
            raise _wrong_state(node, "nothing runs there; cordon it to keep new work from it")
        if node.cordoned and node.state in (NodeState.DRAINING, NodeState.DRAINED):
            return None
        return NodeDraining(
            event_id=str(uuid.uuid4()),
            occurred_at=utc_now(),
            node=name,
            by="user",
            timeout_s=allowed_s,
            reason=reason,
            actor=who.name,
        )

    return await request(api, name, judge)


async def put_back(api: Gateway, name: str, who: Actor) -> NodeView:
    """Use the node again, once its agent has passed its self-test. A node without an agent loses its cordon only.

    A node that its newest preflight has refused is not measured again: whoever returns it overrules that.

    Raises:
        NotFound: there is no such node.
        Conflict: the node is lost or has left, and nobody keeps it out of use; or the self-test has failed.
        Unavailable: the node's agent does not answer.
    """

    async def judge(node: NodeView) -> NodeEvent | None:
        if node.state is NodeState.READY:
            return None
        checks: list[CheckResult] = []
        if node.state not in AWAY:
            checks = await _self_test(api, node)
        elif not node.cordoned and not node.kept_out:
            raise _wrong_state(node, "it is used again when its agent joins: start it")
        return NodeReturned(
            event_id=str(uuid.uuid4()),
            occurred_at=utc_now(),
            node=name,
            incarnation=node.incarnation,
            actor=who.name,
            self_test=checks,
        )

    return await request(api, name, judge)


async def restart_agent(api: Gateway, name: str) -> NodeView:
    """Have the node's agent hand over to a successor; return the node as it was.

    Raises:
        NotFound: there is no such node.
        Conflict: the node has no agent.
        Unavailable: the agent does not answer, or is of a version that cannot hand over.
    """
    node = await api.read(lambda views: views.find(NODES, name))
    if node.state in AWAY:
        raise _wrong_state(node, "it has no agent that could be started again")
    try:
        result = await api.bus.call(AGENT_RESTART, AgentRestart(incarnation=node.incarnation), node.name)
    except Unavailable as err:
        raise Unavailable(f"the agent of node {name!r} does not answer: {err.detail}") from err
    _check_incarnation(node, result.incarnation)
    return node


async def request(api: Gateway, name: str, judge: Judge) -> NodeView:
    """Append the event that ``judge`` returns for the node's present state; return the node after it."""

    async def find() -> NodeView:
        return await api.read(lambda views: views.find(NODES, name))

    return await api.changed(find, judge, f"node {name!r}")


async def _self_test(api: Gateway, node: NodeView) -> list[CheckResult]:
    """Have the node's agent test itself; return what it found.

    Raises:
        Conflict: it has failed.
        Unavailable: the agent does not answer, or not readably.
    """
    ready = await api.read(lambda views: views.page(NODES, states=[NodeState.READY.value]))
    heard = api.live.state().heartbeats
    peers = {
        peer.name: ProbeTarget(address=heard[peer.name].probe, incarnation=peer.incarnation)
        for peer in ready
        if peer.hardware == node.hardware and peer.name != node.name and peer.name in heard and heard[peer.name].probe
    }
    isolated = node.state is NodeState.ISOLATED
    # An operator who returns a node that was refused has seen what is slow, and uses it all the same.
    result = await run_self_test(api.bus, node.name, peers, empty=isolated, preflight=not node.preflight)
    if result.problem:
        raise Conflict(f"node {node.name!r} has failed its self-test: {result.problem}", state=node.state.value)
    _check_incarnation(node, result.incarnation)
    return result.checks


def _check_incarnation(node: NodeView, incarnation: str) -> None:
    """Refuse the answer of another agent than the one that the log knows.

    Raises:
        Unavailable: it is another one.
    """
    if incarnation != node.incarnation:
        raise Unavailable(f"the agent of node {node.name!r} was started again and has not joined yet; try again")


def _wrong_state(node: NodeView, advice: str) -> Conflict:
    return Conflict(f"node {node.name!r} is {node.state.value}: {advice}", state=node.state.value)
