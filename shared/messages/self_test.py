"""Messages by which a node's agent is had to test itself, before the node is used again: core NATS.

The api asks for it when a user returns a node, and the detector before an isolated node returns by itself.
``run_self_test`` is what both do: the peers measure their own bandwidth first, which that of the node is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shared.bus.endpoints import Endpoint
from shared.bus.messages import Message, MessageId
from shared.errors import Unavailable
from shared.events.node_events import CheckResult
from shared.messages.probes import ProbeTarget
from shared.names import Name

if TYPE_CHECKING:
    from shared.bus.connection import Bus

BANDWIDTH = "bandwidth"
"""Name of the check of the links to peers."""

BANDWIDTH_FLOOR_BYTES_PER_S = 1e6
"""Rate below which a link is broken, where peers have no link of their own to compare it with. A link that negotiated
10 Mbit/s has this rate, and moving a GiB of state takes a quarter of an hour."""

PEER_FRACTION = 0.25
"""Part of the peers' rate among themselves that the node must reach, instead. Links that are equal differ by less, and
one that lost a lane or negotiated the next lower speed (100 Gbit/s to 25 or 10) has a quarter or less."""

PEERS = 3
"""Most peers that take part. With three, one slow peer does not decide."""


class SelfTest(Message):
    """A request to test the node.

    ``empty``: no process of a task may be there, since the node is isolated. ``checks``: names of the checks to do;
    empty: all. ``peers``: healthy nodes of its kind, to which the bandwidth is measured. ``least_bytes_per_s``: its
    bound. ``preflight``: whether a node with that setting is to be measured as well.
    """

    empty: bool = False
    preflight: bool = False
    checks: list[str] = Field(default_factory=list)
    peers: dict[Name, ProbeTarget] = Field(default_factory=dict)
    least_bytes_per_s: Annotated[float, Field(ge=0, le=1e15)] = BANDWIDTH_FLOOR_BYTES_PER_S


class SelfTestResult(Message):
    """The outcome.

    ``problem``: what is wrong, for people; empty: nothing. ``checks``: the result of each; older agents report none.
    """

    incarnation: MessageId
    problem: str = ""
    checks: list[CheckResult] = Field(default_factory=list)


SELF_TEST = Endpoint(
    "unicron.self-test.*", SelfTest, SelfTestResult, by=("detector", "api"), to=("node",), timeout_s=110.0
)
"""A test takes two seconds; on a busy machine whose fork server has not imported torch yet, ten times that. A machine
that takes longer should not be used. A preflight takes 80 s more at most, of which 50 s are for neighbours."""


async def run_self_test(
    bus: Bus, node: str, peers: Mapping[str, ProbeTarget], *, empty: bool, preflight: bool = False
) -> SelfTestResult:
    """Have a node's agent test itself, and return what it found.

    Args:
        bus: connected.
        node: its name.
        peers: healthy nodes of its kind; the first ``PEERS`` by name take part.
        empty: whether no process of a task may be there.
        preflight: whether the node is measured, if its operator wants that.

    Raises:
        Unavailable: the agent does not answer, or not readably.
    """
    chosen = {name: peers[name] for name in sorted(peers)[:PEERS]}
    least = BANDWIDTH_FLOOR_BYTES_PER_S
    if len(chosen) > 1:
        first, *others = chosen
        asked = SelfTest(checks=[BANDWIDTH], peers={name: chosen[name] for name in others}, least_bytes_per_s=0.0)
        try:
            among = await _ask(bus, first, asked)
        except Unavailable:
            among = SelfTestResult(incarnation="unknown")
        rates = [check.value for check in among.checks if check.name == BANDWIDTH and check.value]
        least = PEER_FRACTION * rates[0] if rates else least
    return await _ask(bus, node, SelfTest(empty=empty, preflight=preflight, peers=chosen, least_bytes_per_s=least))


async def _ask(bus: Bus, node: str, request: SelfTest) -> SelfTestResult:
    """Return an agent's answer.

    Raises:
        Unavailable: the agent does not answer, or not readably.
    """
    try:
        return await bus.call(SELF_TEST, request, node)
    except Unavailable as err:
        raise Unavailable(f"the agent of node {node!r} does not answer: {err.detail}") from err
