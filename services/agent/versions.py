"""The version of the protocol that this agent has in common with a library, which is released and installed apart."""

from __future__ import annotations

from shared.errors import Unavailable
from shared.service.metrics import version
from unicron.protocol import versions


def agreed(who: str, oldest: int, newest: int | None, library: str) -> int:
    """Return the version that this agent and a library use with each other.

    Args:
        who: whose library it is.
        oldest: the oldest version that it speaks.
        newest: the newest; None: it speaks ``oldest`` alone.
        library: its own version; empty: it does not say.

    Raises:
        Unavailable: the two have no version in common; the error names the versions of both.
    """
    newest = oldest if newest is None else newest
    if (found := versions.agreed(oldest, newest)) is not None:
        return found
    older = "library there" if newest < versions.OLDEST else "agent"
    theirs, ours = versions.text(oldest, newest), versions.text(versions.OLDEST, versions.VERSION)
    raise Unavailable(
        f"{who}: unicron {library or 'of another version'} speaks protocol {theirs}; the node agent, "
        f"unicron-cluster {version()}, speaks {ours}: install a newer {older}"
    )
