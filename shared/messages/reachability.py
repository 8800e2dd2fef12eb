"""Nodes that the detector does not hear though they are not lost: the detector publishes them, the api shows them.

The message is no decision and stays out of the log: it says what holds at this moment, and is published again and
again.
"""

from __future__ import annotations

from pydantic import Field

from shared.bus.endpoints import NOTHING, Endpoint
from shared.bus.messages import Message, Time
from shared.model import Model
from shared.names import Label, Name

PUBLISHED_EVERY_S = 1.0
"""Interval at which the message is repeated; a change is published at once."""

STALE_S = 5.0
"""Age from which a message no longer counts: its sender has ended, or is cut off from NATS itself. By then five
messages were missed."""


class Unreachable(Model):
    """A node that is silent and not lost.

    ``since``: when it was heard last. ``reached_by``: witnesses that reach its agent: nodes, or ``@detector``.
    """

    since: Time
    reached_by: list[Label] = Field(default_factory=list)


class Reachability(Message):
    """The nodes that the detector does not hear.

    ``unreachable``: by node. ``cut_off_since``: the time since which no node is heard; None while some are.
    """

    unreachable: dict[Name, Unreachable] = Field(default_factory=dict)
    cut_off_since: Time | None = None


REACHABILITY = Endpoint("unicron.reachability", Reachability, NOTHING, by=("detector",), to=("api",))

ECHO = Endpoint("unicron.echo.*", NOTHING, NOTHING, by=("detector",), to=("detector",))
"""The detector's messages to itself, which show that its own connection works."""
