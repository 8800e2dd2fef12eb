"""Who speaks on the bus: one identity for each service, and one for each node.

NATS knows an identity by its key (``shared.bus.credentials``) and lets it use the subjects of ``shared.nats.rights``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.names import LABEL

SERVICES = ("detector", "planner", "transition", "api")
"""The identities of services."""

NODE = "node"
"""The beginning of the identities of nodes: ``node/<name>``."""

INBOX = "_INBOX"
"""The beginning of the subjects of replies: NATS's own word, which its tools expect."""

Identity = Annotated[str, Field(pattern=rf"^({NODE}/)?{LABEL}$")]
"""The name of a service, or ``node/<name>``."""


def node_identity(node: str) -> str:
    """Return the identity of a node."""
    return f"{NODE}/{node}"


def node_of(identity: str) -> str | None:
    """Return the node whose identity this is; None if it is no node's."""
    kind, separator, name = identity.partition("/")
    return name if separator and kind == NODE else None


def inbox_prefix(identity: str) -> str:
    """Return the beginning of the subjects of the replies to an identity. Nobody else may subscribe to them."""
    return f"{INBOX}.{identity.replace('/', '.')}"
