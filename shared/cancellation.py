"""Cancellation that libraries can neither swallow nor feign."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Raise ``CancelledError`` at the end of the block if the task was cancelled within it and nothing else told.

    ``asyncio.wait_for`` of Python 3.11, on which nats-py rests, returns a result that comes in the same turn of the
    loop as a cancellation and drops the latter: a loop around it would never end.
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
    """Something that was awaited had been cancelled, and not the task that awaited it."""


@contextlib.contextmanager
def foreign() -> Iterator[None]:
    """Raise ``Foreign`` in place of a ``CancelledError`` that is not a cancellation of this task.

    A task that awaits a future itself cancels it when it is cancelled; who awaits it next is told so.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except asyncio.CancelledError as err:
        if task is not None and task.cancelling() == before:
            raise Foreign from err
        raise


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it is over; what it raised is left in it.

    Not for a task that has cleaning up to do: every further cancellation would break into that. The pauses grow, so
    that they cannot keep step with a loop in the task that swallows a cancellation at the same point each time.
    """
    pause_s = 0.0
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=pause_s)
        pause_s = 1.5 * pause_s + 0.001
