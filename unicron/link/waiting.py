"""Waiting for a collective in slices, so that the waiting thread can give a collective up between two slices."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

Wait = Callable[[Any], None]
"""Waits for a collective (torch's ``Work``) and raises the collective's error: the type of ``AgentLink.wait``, for code
that needs nothing else of the link."""

SLICE = timedelta(milliseconds=100)
"""Longest wait for a collective before the thread checks whether the collective has to be given up. Chosen: short
beside ``unicron.link.collectives.STUCK_S``."""


def has_ended(work: Any) -> bool:
    """Wait for a collective (torch's ``Work``) for one slice; return whether the collective has ended.

    Raises:
        RuntimeError: the collective failed.
    """
    try:
        work.wait(SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # The collective may have ended after the slice did. A second wait raises the collective's own error, if any.
        work.wait(SLICE)
    return True
