"""The state snapshots of a running service: it starts from the newest, and has one written now and then.

    async with StateKeeper(context, KEPT) as keeper:
        await Service(context, keeper).run()  # a ``shared.service.runner.Runner``

A process of its own writes (``main`` below, by ``services.<service>.state_snapshot``): it folds the log from the newest
snapshot on, as a start does. No decision waits for it, neither for the file nor for the interpreter's lock, and what it
writes is the fold of the log alone. At a planned stop, when nothing is decided any more, the service does the same
itself. Whatever goes wrong with a snapshot is logged, and the service goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

from pydantic_core import PydanticSerializationError

from shared.bus.outages import LOG
from shared.errors import UnicronError
from shared.log.log import EventLog
from shared.machine.process import PARENT_DEATH_VARIABLE, watch_parent
from shared.service.frame import Context
from shared.service.log_lines import log_to_stderr
from shared.service.state_snapshots import KeptState, StateSnapshots
from shared.settings.model import Settings, read_settings

logger = logging.getLogger(__name__)

S = TypeVar("S")

AT_STOP = 10
"""Divisor of ``state_snapshot_events``: if at least so many events came since the last snapshot, one is written at a
planned stop. Folding fewer at the next start takes less time than writing."""

MOST_AT_STOP = 2
"""Multiple of ``state_snapshot_events`` beyond which no snapshot is written at a planned stop, since it would take too
long."""

_NICENESS = 19
"""The niceness of the process that writes: everything else comes first."""

_FAILURES = UnicronError, OSError, PydanticSerializationError


class StateKeeper(Generic[S]):
    """Loads and writes the snapshots of a service; an async context manager around the service's work.

    Args:
        context: the service's.
        kept: what is kept of the service.
    """

    def __init__(self, context: Context, kept: KeptState[S]) -> None:
        self._context = context
        self._kept = kept
        self._every = context.settings.state_snapshot_events
        self._snapshots = StateSnapshots(folder_of(context.settings), kept)
        self._position = 0
        self._written = 0
        """Position of the newest snapshot, or of the last attempt to write one."""
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> tuple[int, S] | None:
        """Return the newest snapshot that fits the log, with its position; None if none does.

        This process's time follows the log's.

        Raises:
            Corrupt: the event at its position cannot be read back.
        """
        if self._every == 0:
            return None
        journal = self._context.journal
        try:
            found = await journal.outages.outlast(LOG, lambda: self._snapshots.newest(journal.log))
        except UnicronError as err:
            logger.warning("no state snapshots: %s", err.detail)
            self._every = 0
            return None
        if found is None:
            return None
        await journal.follow_time(found.position)
        self._position = self._written = found.position
        logger.info("starts from the state snapshot at position %d", found.position)
        return found.position, found.state

    def handled(self, position: int) -> None:
        """Note that the service has handled the log up to a position: what it has to append for it is in the log."""
        self._position = position
        if self._every and self._context.is_ready and position >= self._written + self._every:
            self._due.set()

    async def __aenter__(self) -> Self:
        """Begin to write."""
        self._task = asyncio.create_task(self._keep(), name="state snapshots")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop writing snapshots; at a planned stop, write one."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._context.stop.is_set() and self._is_due_at_stop():
            log, position = self._context.journal.log, self._position
            try:
                await asyncio.to_thread(self._snapshots.write, log, position)
            except _FAILURES as err:
                logger.warning("no state snapshot at the stop: %s", err)

    def _is_due_at_stop(self) -> bool:
        new = self._position - self._written
        return self._every > 0 and max(1, self._every // AT_STOP) <= new <= MOST_AT_STOP * self._every

    async def _keep(self) -> None:
        while True:
            await self._due.wait()
            position = self._position
            if not await self._write_aside(position):
                logger.warning("no state snapshot at position %d", position)
            self._written = position
            self._due.clear()

    async def _write_aside(self, position: int) -> bool:
        """Write a snapshot by another process; return whether that worked."""
        settings = self._context.settings
        environment = {
            **os.environ,
            "UNICRON_RUN_DIR": str(settings.run_dir.resolve()),
            "UNICRON_LOG_URL": settings.log_database_url,
            PARENT_DEATH_VARIABLE: str(os.getpid()),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", f"services.{self._kept.service}.state_snapshot", str(position)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        try:
            return await process.wait() == 0
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise


def folder_of(settings: Settings) -> Path:
    """Return where the snapshots are."""
    return settings.run_dir.resolve() / "state-snapshots"


def main(kept: KeptState[S], arguments: Sequence[str]) -> int:
    """Write a snapshot of a service whose settings are in the environment; return the exit status.

    Args:
        kept: what is kept of the service.
        arguments: the position up to which the service has handled the log.
    """
    log_to_stderr(f"{kept.service}-snapshot")
    if not watch_parent():
        return 1
    os.nice(_NICENESS)
    settings = read_settings()
    try:
        with closing(EventLog(settings.log_database_url, read_only=True, segments=settings.log_segments)) as log:
            position = StateSnapshots(folder_of(settings), kept).write(log, int(arguments[0]))
    except _FAILURES as err:
        logger.warning("no state snapshot: %s", err)
        return 1
    logger.info("state snapshot at position %d", position)
    return 0
