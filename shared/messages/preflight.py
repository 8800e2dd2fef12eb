"""Messages of a node's preflight: of an agent that measures with a neighbour, and tells the detector: core NATS.

An agent with the setting ``preflight`` sends a ``PreflightReport`` before it joins, and when its node is tested before
it is used again. The detector judges it, and what it has decided is in the log before the agent has the answer.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.bus.endpoints import Endpoint
from shared.bus.messages import Integer, Message, MessageId
from shared.events.measurements import DeviceName, Measurement, Verdict
from shared.names import Label, Name, SocketAddress


class PreflightReport(Message):
    """What an agent has measured on its node.

    ``report``: an id of its own, by which a report that is sent again is known. The node is described as in
    ``shared.messages.signals.Heartbeat``: one that is refused sends none that counts.
    """

    node: Name
    incarnation: MessageId
    report: MessageId
    agent_pid: Integer
    supervisor: Label = ""
    domain: Label = "default"
    hardware: Label = "cpu"
    workers: Annotated[list[str], Field(max_length=1024)]
    measurement: Measurement


class PreflightAnswer(Message):
    """The detector's answer. ``reason``: why it refuses the node, or compares it with nothing; for people."""

    verdict: Verdict
    reason: str = ""


PREFLIGHT = Endpoint(
    "unicron.preflight.*",
    PreflightReport,
    PreflightAnswer,
    by=("node",),
    to=("detector",),
    timeout_s=3.0,
    names_sender=True,
)
"""The detector answers after one append to the log; a busy machine has a hundred times the few milliseconds of that."""


class NeighbourRequest(Message):
    """A request for a node to measure with.

    ``device``, ``count``: as in ``Measurement``; the other one has the same. ``store``: where this node has a
    rendezvous store for both. ``known``: nodes with which it has measured already.
    """

    node: Name
    device: DeviceName
    count: Integer
    store: SocketAddress
    known: Annotated[list[Name], Field(max_length=8)] = Field(default_factory=list)


class NeighbourAnswer(Message):
    """The other node, which begins now; None: there is none. ``store``: its store; None: this node's is used."""

    peer: Name | None = None
    store: SocketAddress | None = None


NEIGHBOUR = Endpoint(
    "unicron.neighbour.*",
    NeighbourRequest,
    NeighbourAnswer,
    by=("node",),
    to=("detector",),
    timeout_s=15.0,
    names_sender=True,
)
"""The detector waits for a node that starts at the same time, and asks some that are not in use, before it answers."""


class MeetRequest(Message):
    """A request to an agent: measure with this neighbour, at its store, if no process of a task is on your node."""

    peer: Name
    store: SocketAddress


class MeetReply(Message):
    """An agent's answer. ``begins``: whether it begins now."""

    begins: bool = False


MEET = Endpoint("unicron.meet.*", MeetRequest, MeetReply, by=("detector",), to=("node",), timeout_s=2.0)
"""An agent looks at the processes of its machine, which takes a tenth of a second."""
