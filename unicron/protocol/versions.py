"""The versions of the protocol between an agent and the library, which are released and installed apart.

The protocol is all that the two say to each other: the messages on a rank's socket (``unicron.protocol.messages``),
those of a fork server (``unicron.forkserver``), the variables of a rank (``unicron.protocol.environment``), and the
specification of a task. Each side speaks two versions, and the library says so first. They use the newest that both
speak; without one the agent refuses. Standard library only.
"""

from __future__ import annotations

__version__ = "0.1.0"
"""Version of the library."""

VERSION = 3
"""The newest version of the protocol: one higher with every change that an older reader would misread. A new field has
a default, and its message means the same to a reader that ignores the field. Version 2 says the version alone, where 3
says a range."""

OLDEST = VERSION - 1
"""The oldest version that is spoken here. The library says it in the field ``version``, and ``VERSION`` in ``newest``,
which an agent of version 2 ignores."""


def agreed(oldest: int, newest: int) -> int | None:
    """Return the newest version that is spoken here and by another side, which speaks a range; None: there is none."""
    common = min(newest, VERSION)
    return common if common >= max(oldest, OLDEST) else None


def text(oldest: int, newest: int) -> str:
    """Return how a range is written."""
    return str(newest) if oldest == newest else f"{oldest} to {newest}"
