"""The work that an agent does in the background."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from shared.bus.cancellation import cancelled

logger = logging.getLogger(__name__)


class Background:
    """The tasks of one agent.

    Attributes:
        broken: the error that ended vital work.
    """

    def __init__(self) -> None:
        self.broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> None:
        """Run something; the failure of ``vital`` work is ``broken``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._done, vital=vital))

    async def stop(self) -> None:
        """Cancel everything."""
        await cancelled(*self._tasks)

    def _done(self, task: asyncio.Task[None], *, vital: bool) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            logger.error("background work failed", exc_info=err)
            if vital and not self.broken.done():
                self.broken.set_result(err)


async def every(interval_s: float, do: Callable[[], None]) -> None:
    """Do something at an interval until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        do()
