"""The feed: folds the log into the projections, and lets requests wait for a position.

A ``Feed`` belongs to the event loop. The store folds in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from services.api.store.projection_store import Observe, Store, ignored
from shared.bus.outages import LOG
from shared.errors import Unavailable
from shared.events.union import Recorded
from shared.log.journal import Journal
from shared.service.changes import Changes

logger = logging.getLogger(__name__)

PROJECTIONS = "the projections"
"""Part of the text in the health: their database may be another one than the log's."""

_BATCH = 500
"""Records folded in one transaction while catching up."""


class Feed:
    """Folds records as they are appended. ``position``: of the last folded one; ``closed``: streams are to end.

    Args:
        store: of the projections.
        journal: of the log.
        observe: called with what each batch has changed, except where the projections are built from position 0.
    """

    def __init__(self, store: Store, journal: Journal, observe: Observe = ignored) -> None:
        self._store, self._observe = store, observe
        self._journal = journal
        self._changed = Changes()
        self.position = 0
        self.closed = False

    async def catch_up(self) -> None:
        """Fold the records that the log has now; projections of another log (an older run's file) are dropped first."""
        log = self._journal.log
        self.position, head = await self._journal.outages.outlast(PROJECTIONS, self._store.head)
        if self.position:
            if await self._journal.outages.outlast(LOG, lambda: log.hash_at(self.position)) != head:
                logger.warning("the projections belong to another log: folding from the start")
                await self._journal.outages.outlast(PROJECTIONS, self._store.reset)
                self.position = 0
        observe = self._observe if self.position else ignored
        while records := await self._journal.outages.outlast(LOG, lambda: log.read(after=self.position, limit=_BATCH)):
            await self._fold(records, observe)

    async def follow(self) -> None:
        """Fold every further record, those that are there at once in one transaction; runs until cancelled."""
        await self._journal.follow_several(self._fold, consumer="api", after=self.position)

    async def _fold(self, records: Sequence[Recorded], observe: Observe | None = None) -> None:
        """Fold records, which has no effect a second time, and let everybody know."""
        observe = observe or self._observe
        self.position = await self._journal.outages.outlast(PROJECTIONS, lambda: self._store.fold(records, observe))
        self._changed.notify()

    async def wait_beyond(self, position: int, *, timeout_s: float) -> bool:
        """Wait until a record behind ``position`` has been folded, or the feed is closed; False after the time-out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.until(lambda: self.closed or self.position > position)
        except TimeoutError:
            return False
        return True

    async def reach(self, position: int, *, timeout_s: float) -> None:
        """Wait until ``position`` has been folded.

        Raises:
            Unavailable: it has not been folded within ``timeout_s``.
        """
        if not await self.wait_beyond(position - 1, timeout_s=timeout_s):
            raise Unavailable(f"the projections have not reached position {position} in {timeout_s:g} s")

    async def close(self) -> None:
        """End all waits, so that streams end."""
        self.closed = True
        self._changed.notify()
