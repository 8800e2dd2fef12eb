"""A condition that a test waits for: the one wait of all tests, with one limit and an error that says what was seen.

A condition is a function. The wait returns what the function returns once it is true. A function that raises ends the
wait: what is waited for can no longer come.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any

LIMIT_S = 60.0
"""How long a test waits for what must come: far longer than it takes, also on a busy machine."""

SHORTEST_S, LONGEST_S = 0.001, 0.05
"""Bounds of the pause between two looks. The pause is a hundredth of the time waited, so that no wait takes much longer
by it, and no long wait looks often."""

SHOWN_CHARACTERS = 8000
"""How much of the end of an object is shown that was seen last; a text is shown whole."""


async def until(
    holds: Callable[[], Any], what: str = "", *, limit_s: float = LIMIT_S, seen: Callable[[], Any] | None = None
) -> Any:
    """Wait until a condition is true, in the time of the running loop; return its value.

    Args:
        holds: the condition; it may be a coroutine function.
        what: what is waited for; without it, the error has the source of the condition.
        limit_s: for how long to wait.
        seen: what the error shows, which may be a coroutine function; without it, the condition's last value.

    Raises:
        AssertionError: the condition is not true within ``limit_s``.
    """
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    while not (value := await _value(holds)):
        waited_s = clock() - begun_s
        if waited_s > limit_s:
            raise AssertionError(_in_vain(holds, what, limit_s, await _value(seen) if seen else value))
        await asyncio.sleep(_pause_s(waited_s))
    return value


def until_blocking(
    holds: Callable[[], Any], what: str = "", *, limit_s: float = LIMIT_S, seen: Callable[[], Any] | None = None
) -> Any:
    """Wait as ``until`` does, without a loop: other threads or processes make the condition true."""
    begun_s = time.monotonic()
    while not (value := holds()):
        waited_s = time.monotonic() - begun_s
        if waited_s > limit_s:
            raise AssertionError(_in_vain(holds, what, limit_s, seen() if seen else value))
        time.sleep(_pause_s(waited_s))
    return value


async def _value(function: Callable[[], Any]) -> Any:
    found = function()
    return await found if isinstance(found, Coroutine) else found


def _pause_s(waited_s: float) -> float:
    return min(LONGEST_S, max(SHORTEST_S, waited_s / 100))


def _in_vain(holds: Callable[[], Any], what: str, limit_s: float, seen: Any) -> str:
    shown = seen if isinstance(seen, str) else repr(seen)[-SHOWN_CHARACTERS:]
    return f"waited {limit_s:g} s in vain for: {what or _source(holds)}; seen last: {shown}"


def _source(holds: Callable[[], Any]) -> str:
    """Return the lines in which a condition is written; its name, where there are none."""
    try:
        return " ".join(inspect.getsource(holds).split())
    except (OSError, TypeError):
        return repr(holds)
