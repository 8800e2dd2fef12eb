"""The end of rank processes that the node is to have no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from services.agent.machine.proc import process_state
from services.agent.node.process import Process
from shared.service.changes import Changes

QUIT_GRACE_S = 0.5
"""Time after which a waiting rank that was asked to quit is killed: it has nothing to save."""

FINISH_GRACE_S = 5.0
"""The grace of a rank that has finished its task: the rank flushes its output and leaves its process group."""

KILLED = -9
"""Exit code of a rank that ended together with its fork server."""

KILLED_TIMEOUT_S = 1.0
"""How long to wait for the end of a killed rank whose fork server has ended."""


async def end(
    processes: Sequence[Process],
    changes: Changes,
    *,
    quit_: Callable[[Process], None],
    kill: Callable[[Process], None],
) -> None:
    """End processes; return when they have ended.

    A process that waits is asked to quit, and killed after a grace. A process that computes, blocks or is stopped is
    killed at once: it has nothing to save, and might never read a message.

    Args:
        processes: alive.
        changes: notified whenever a process changes.
        quit_: asks a process to quit.
        kill: kills a process.
    """
    grace_s = 0.0
    for process in processes:
        stopped = process.pid is not None and process_state(process.pid) in ("T", "t")
        if (process.waiting or process.finished) and not stopped:
            quit_(process)
            grace_s = max(grace_s, FINISH_GRACE_S if process.finished else QUIT_GRACE_S)
        else:
            kill(process)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s or None):
            await changes.until(lambda: not any(p.alive for p in processes))
    for process in processes:
        if process.alive:
            kill(process)
    await changes.until(lambda: not any(p.alive for p in processes))
