"""Outages: a process waits for a part of the control plane that has gone away, and goes on where it was.

    await outages.outlast(LOG, lambda: log.append(events))

``outlast`` repeats a call that raises ``Unavailable``, with growing pauses. Its health (``shared.service.frame``) says
meanwhile what the process waits for, and why. Only a call that can be repeated belongs here: an append can, since an
event has an id and the log takes it once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_delay,
    stop_never,
    wait_exponential,
    wait_random,
)

from shared.errors import AccessDenied, Unavailable

logger = logging.getLogger(__name__)

LOG = "the log"
"""The name of what most waits are for; part of the text in the health."""

LOG_ROOM = "the log to take events"
"""The name of what an append waits for. A log on a full disk is readable all the time, and a read must not end this
wait."""

FIRST_PAUSE_S = 0.1
"""Pause after the first failure, since a connection that was cut is usually there again at once. Each further pause
doubles."""

LONGEST_PAUSE_S = 2.0
"""Longest pause: a service goes on at most this long after the part is back. An attempt costs one connection."""

JITTER_S = 0.1
"""Random part of a pause, so that the services do not come back in the same instant."""

T = TypeVar("T")


class Outages:
    """The outages of one process. Only the event loop may use it.

    ``count``: how many outages have begun, and how many have ended, in one number: if it is the same as before, nothing
    was away meanwhile, or one thing all the time.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._since_s: dict[str, float] = {}
        self.count = 0

    @property
    def detail(self) -> str:
        """What the process waits for at this moment, and why, in words; empty if it waits for nothing."""
        return "; ".join(f"waiting for {what}: {reason}" for what, reason in sorted(self._reasons.items()))

    async def outlast(
        self, what: str, attempt: Callable[[], T], *, limit_s: float | None = None, starting: bool = False
    ) -> T:
        """Call ``attempt`` in a thread, again while it raises ``Unavailable``; return what it returns.

        Args:
            what: the part of the control plane that it needs, in words.
            attempt: the call, which is safe to repeat after an attempt with an unknown effect.
            limit_s: no attempt begins after this time; None: there is no limit.
            starting: the process starts, so ``AccessDenied`` is a mistake in its settings and is raised at once. Later
                it is an outage like any other: during a fail-over a server may refuse whom it knows a moment later.

        Raises:
            Unavailable: the last attempt raised it, and the limit has passed.
            AccessDenied: see ``starting``.
        """

        def passes(error: BaseException) -> bool:
            return isinstance(error, Unavailable) and not (starting and isinstance(error, AccessDenied))

        def note(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            self._note(what, error.detail if isinstance(error, Unavailable) else "")

        retrying = AsyncRetrying(
            retry=retry_if_exception(passes),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S) + wait_random(0.0, JITTER_S),
            stop=stop_never if limit_s is None else stop_after_delay(limit_s),
            before_sleep=note,
            reraise=True,
        )
        try:
            result: T = await retrying(asyncio.to_thread, attempt)
        except BaseException:
            self._forget(what)  # this call no longer waits; another call that still does notes the wait again
            raise
        self._end(what)
        return result

    def _note(self, what: str, reason: str) -> None:
        known = self._reasons.get(what)
        if known is None:
            self.count += 1
            self._since_s[what] = time.monotonic()
        if known != reason:
            self._reasons[what] = reason
            logger.warning("waiting for %s: %s", what, reason)

    def _end(self, what: str) -> None:
        if (seconds := self._forget(what)) is not None:
            logger.warning("%s: waited for %.1f s", what, seconds)

    def _forget(self, what: str) -> float | None:
        """Drop the note of a wait; return how long it was, in seconds, None if there was none."""
        if self._reasons.pop(what, None) is None:
            return None
        self.count += 1
        return time.monotonic() - self._since_s.pop(what)
