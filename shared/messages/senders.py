"""Who sent a message: NATS vouches for the subject (``server.rights``), and the message has to name the same node."""

from __future__ import annotations

from shared.bus.dropped import COUNTER, WRONG_SENDER
from shared.bus.messages import shown
from shared.errors import Undecodable


class WrongSender(Undecodable):
    """A message that names another node than the one that sent it."""


def check_sender(subject: str, node: str) -> None:
    """Refuse a message that names another node than its subject does.

    Args:
        subject: of the message, or the node that it ends with.
        node: as the message says.

    Raises:
        WrongSender: these are two.
    """
    sender = subject.rpartition(".")[2]
    if sender != node:
        raise WrongSender(f"it comes from node {sender}, and names node {shown(node)}", node=sender)


def counter_of(error: Undecodable) -> str:
    """Return the counter of a message that is dropped for this reason."""
    return WRONG_SENDER if isinstance(error, WrongSender) else COUNTER
