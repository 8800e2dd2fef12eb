"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from shared.errors import TimedOut

T = TypeVar("T")

POLL_S = 0.5
"""Time between two looks at a condition of a task: training takes minutes to weeks."""


def until(
    what: str,
    found: Callable[[], T | None],
    limit_s: float | None = None,
    *,
    poll_s: float = POLL_S,
    instead: Callable[[], str] = str,
) -> T:
    """Wait until ``found`` returns something other than None; return that.

    Args:
        what: is waited for, in words that follow "for".
        found: looks once.
        limit_s: longest wait in seconds; None: without end.
        poll_s: seconds between two looks.
        instead: returns how it is instead, in words; empty: not known.

    Raises:
        TimedOut: the limit has passed.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while True:
        value = found()
        if value is not None:
            return value
        left_s = poll_s if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            how = instead()
            raise TimedOut(f"waited {limit_s:g} s in vain for {what}{f': {how}' if how else ''}")
        time.sleep(min(poll_s, left_s))
