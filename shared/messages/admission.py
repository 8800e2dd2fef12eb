"""Messages by which an agent is admitted to the cluster, and leaves it in order: core NATS, between agent and detector.

An agent that starts sends a ``Hello`` before it takes commands, starts processes or sends heartbeats, and again until
the ``Answer`` is ``admitted`` or ``refused``. The detector asks the agent that has the name, if there is one, whether
it lives (``ALIVE``). An agent whose name was given to a successor meanwhile gets a ``Revocation``.

The api asks an agent to leave its processes to a successor. The agent answers, and ends. Its supervisor starts the next
one, of the program that is installed by then.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.bus.endpoints import NOTHING, Endpoint, Signs
from shared.bus.messages import REASON_CHARACTERS, Message, MessageId, Seconds
from shared.names import Host, Label, Name

INCARNATION = r"^[0-9a-f]{32}$"
"""An agent's incarnation: a random UUID in hexadecimal. It becomes a part of subjects, so no other text may."""


class AgentRestart(Message):
    """Hand over. ``incarnation``: that of the agent that is meant; another agent answers, and stays."""

    incarnation: MessageId


class AgentRestartResult(Message):
    """The answer. ``incarnation``: that of the agent that answers, which ends if it is the one that was meant."""

    incarnation: MessageId


AGENT_RESTART = Endpoint(
    "unicron.agent-restart.*", AgentRestart, AgentRestartResult, by=("api",), to=("node",), timeout_s=3.0
)
"""An answer takes milliseconds; a busy machine has a hundred times that."""


class Hello(Message):
    """An agent wants to join under a name.

    ``addresses``: setting -> the IP address that it amounts to, for each setting under which peers reach the node.
    ``network``: the network stack of the machine (boot and network namespace). Agents with the same one reach one
    another by loopback addresses. ``supervisor``: id of the process that starts the machine's agents, one after the
    other: an agent that has the same one as the node's present agent is its successor. Empty: there is none.
    """

    node: Name
    incarnation: Annotated[str, Field(pattern=INCARNATION)]
    addresses: dict[Label, Host]
    network: Label
    supervisor: Label = ""


class Answer(Message):
    """The detector's answer. ``code``: of a refusal, the code of the exception (``shared.errors``).

    ``wait``: whether the agent is admitted is not known yet; it asks again. ``detail``: why, for people.
    """

    verdict: Literal["admitted", "refused", "wait"]
    code: str = ""
    detail: str = ""


class Revocation(Message):
    """The name of the receiver belongs to a newer agent, so the receiver has to end."""

    node: Name
    detail: str


class Departure(Message):
    """The sender's node leaves. ``reason``: in words, for people.

    ``drain_s``: once its tasks have moved away, for which they have this time; 0: at once.
    """

    node: Name
    incarnation: MessageId
    reason: Annotated[str, Field(max_length=REASON_CHARACTERS)]
    drain_s: Seconds = 0.0


class DepartureAnswer(Message):
    """The detector's answer. ``left``: the log says so, or has nothing of this agent. ``wait``: tasks are still there.

    ``detail``: why, for people; for ``wait``, the tasks.
    """

    verdict: Literal["left", "wait", "refused"]
    detail: str = ""


HELLO = Endpoint("unicron.hello.*", Hello, Answer, by=("node",), to=("detector",), timeout_s=3.0, names_sender=True)
"""The detector may ask two other agents first, for half a second each (``services.detector.main``)."""

ALIVE = Endpoint("unicron.alive.*.*", NOTHING, Signs(b"+"), by=("detector",), to=("node",), timeout_s=0.5)
"""Whether the agent with this node and incarnation lives. It answers within milliseconds; without an answer the new
agent asks again."""

REVOKED = Endpoint("unicron.revoked.*.*", Revocation, NOTHING, by=("detector",), to=("node",))
"""Sent to the agent with this node and incarnation."""

DEPARTURES = Endpoint(
    "unicron.departures.*", Departure, DepartureAnswer, by=("node",), to=("detector",), timeout_s=1.0, names_sender=True
)
"""The detector answers after one append to the log, in about 5 ms."""
