"""Cancellation that libraries cannot swallow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


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
