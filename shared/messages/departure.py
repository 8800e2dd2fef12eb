"""Messages by which a node leaves the cluster in order: core NATS between an agent and the detector.

An agent that is asked to end announces its departure before it ends its processes. The detector answers once the event
(``node.left``) is in the log. From then on the end of the node's processes is no fault. An agent that gives its tasks
time to move away first (``drain_s``) repeats the announcement until they have.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.bus.messages import REASON_CHARACTERS, Message, MessageId, Seconds
from shared.names import Name

DEPARTURES = "unicron.departures"
"""Subject of departures (request and reply)."""


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
