"""Tasks that are cancelled until they are done."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from shared.bus import cancellation
from shared.errors import Unavailable


async def test_the_error_of_a_task_that_is_ended_counts_as_noted() -> None:
    """A process that goes on after a suspension cancels requests of which the errors have come at the same time."""
    unnoted: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unnoted.append(context))

    async def fail() -> None:
        raise Unavailable("nobody answers")

    task = asyncio.create_task(fail())
    await asyncio.wait({task})
    await cancellation.end(task)
    del task
    gc.collect()
    assert unnoted == []
