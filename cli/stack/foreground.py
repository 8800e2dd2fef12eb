"""What runs in the foreground until it is asked to end: the embedded stack, the control plane."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, Protocol

from shared.bus.cancellation import cancelled
from shared.errors import UnicronError


class Parts(Protocol):
    """What is started and stopped as a whole."""

    url: str
    """Where its API is, once it has started."""

    @property
    def failed(self) -> asyncio.Future[UnicronError]:
        """A future that is done, with the reason, when a part does not work any more."""

    async def start(self) -> None:
        """Start everything."""

    async def stop(self) -> None:
        """Stop everything, also what was half started."""


async def run(parts: Parts, ready: Callable[[], None] = lambda: None) -> None:
    """Start, print one line ``ready URL``, and stop when asked to (SIGINT, SIGTERM) or when a part fails.

    Args:
        parts: what to run.
        ready: called before the line is printed.

    Raises:
        UnicronError: why a part did not start, or has failed.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(parts.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await _first(starting, stopping)
        if starting.done():
            await starting
            ready()
            print(f"ready {parts.url}", flush=True)
            await _first(parts.failed, stopping)
            if parts.failed.done():
                raise parts.failed.result()
    finally:
        await cancelled(starting, stopping)
        await parts.stop()


async def _first(*waits: asyncio.Future[Any]) -> None:
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
