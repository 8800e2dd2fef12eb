"""Cancellation of asyncio tasks where a library loses or forges it (nats-py on Python 3.11).

``kept`` restores a cancellation that a library has swallowed, ``foreign`` tells the cancellation of an awaited future
from that of the task itself, ``end`` cancels a task until it is done, ``cancelled`` tasks that clean up, and
``completed`` does work that no cancellation may leave half done. ``shared.bus.connection`` and ``shared.log`` use them
around calls of nats-py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Raise ``CancelledError`` at the end of the block if the task was cancelled in it and the block raised none.

    nats-py uses ``asyncio.wait_for``. In Python 3.11 that function drops a cancellation that comes in the same
    iteration of the event loop as the awaited result, so a loop around it would never end.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0

    def swallowed() -> bool:
        return task is not None and task.cancelling() > before

    try:
        yield
    except Exception as err:
        if swallowed():
            raise asyncio.CancelledError from err
        raise
    if swallowed():
        raise asyncio.CancelledError


class Foreign(Exception):
    """The awaited future was cancelled, and not the task that awaited it."""


@contextlib.contextmanager
def foreign() -> Iterator[None]:
    """Raise ``Foreign`` in place of a ``CancelledError`` that is not a cancellation of this task.

    A cancelled task cancels the future that it awaits; other tasks that await the same future get a ``CancelledError``.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except asyncio.CancelledError as err:
        if task is not None and task.cancelling() == before:
            raise Foreign from err
        raise


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks once and wait for them. Their exceptions are not raised here."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def completed(work: Coroutine[Any, Any, None]) -> None:
    """Do some work to its end, however often this task is cancelled meanwhile; the cancellation is raised then."""
    task, cancellation = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as err:
            cancellation = err
    if cancellation is not None:
        raise cancellation from task.exception()
    task.result()


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task repeatedly until it is done. The task's exception, if any, is not raised here.

    It must not be used for a task that cleans up with ``await``, since further cancellations would interrupt the
    cleaning. The pauses between cancellations grow, so that they cannot stay in phase with a loop in the task that
    swallows a cancellation each time.
    """
    pause_s = 0.0
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=pause_s)
        pause_s = 1.5 * pause_s + 0.001
    if not task.cancelled():
        task.exception()  # taken note of: otherwise asyncio logs that nobody has
