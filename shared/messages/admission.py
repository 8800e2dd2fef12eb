"""Messages by which an agent is admitted to the cluster, and leaves it in order: core NATS, between agent and detector.

An agent that starts sends a ``Hello`` before it takes commands, starts processes or sends heartbeats, and again until
the ``Answer`` is ``admitted`` or ``refused``. The detector asks the agent that has the name, if there is one, whether
it lives (``ALIVE``). An agent whose name was given to a successor meanwhile gets a ``Revocation``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.bus.messages import REASON_CHARACTERS, Message, MessageId, Seconds
from shared.names import Host, Label, Name

HELLO = "unicron.hello"
"""Subject of hellos (request and reply)."""

ALIVE = "unicron.alive"
"""Prefix of the subjects of the question whether an agent lives; the incarnation follows (request and reply)."""

REVOKED = "unicron.revoked"
"""Prefix of the subjects of revocations; the incarnation follows (published)."""

INCARNATION = r"^[0-9a-f]{32}$"
"""An agent's incarnation: a random UUID in hexadecimal. It becomes a part of subjects, so no other text may."""

DEPARTURES = "unicron.departures"
"""Subject of departures (request and reply)."""


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
    """The name of the receiver belongs to a newer agent: the receiver has to end."""

    node: Name
    detail: str


HELLO_MESSAGE: TypeAdapter[Hello] = TypeAdapter(Hello)
ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)
REVOCATION: TypeAdapter[Revocation] = TypeAdapter(Revocation)


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

    ``detail``: why, for people; of ``wait``, the tasks.
    """

    verdict: Literal["left", "wait", "refused"]
    detail: str = ""


DEPARTURE: TypeAdapter[Departure] = TypeAdapter(Departure)
DEPARTURE_ANSWER: TypeAdapter[DepartureAnswer] = TypeAdapter(DepartureAnswer)
