"""The feed: folds the log into the projections, and lets requests wait for a position.

A ``Feed`` belongs to the event loop. What folds is called in threads, and has a process of its own in the gateway
(``services/api/fold_process.py``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from services.api.findings import Observe, ignored
from shared.errors import Unavailable
from shared.events import Recorded
from shared.log.journal import Journal
from shared.outages import LOG

logger = logging.getLogger(__name__)

PROJECTIONS = "the projections"
"""Part of the text in the health: their database may be another one than the log's."""

_BATCH = 500
"""Records folded in one transaction while catching up."""

_BETWEEN_S = 0.15
"""From the beginning of a batch that had several records to that of the next one: more come, and the next batch shall
have more of them, since a transaction costs as much as dozens of records."""

_MANY = 250
"""Least records of a batch that puts the feed behind where the batch is not folded when the next one is due: as many
more wait meanwhile. Fewer are folded at once."""

_BEHIND_S = 1.0
"""For how long a feed that is behind counts as such without a further batch: none comes where no event does."""

_LATEST_SETTLING = 4
"""Batches that a feed which is behind folds before it settles time: two seconds of a thousand events each. What
has to be settled grows meanwhile."""

_NEWEST = 10_000
"""Events of which the types are kept: ten seconds of a thousand each."""


class Folds(Protocol):
    """Folds records into the projections; the methods are those of ``services.api.store.Store``."""

    def head(self) -> tuple[int, str]:
        """Return the position up to which the log has been folded, and the hash of its record."""

    def reset(self) -> None:
        """Drop everything that was folded."""

    def fold(self, records: Sequence[Recorded], observe: Observe) -> int:
        """Fold records, which has no effect a second time, and return the position."""

    def settle(self) -> None:
        """Settle time as far as the folded records allow."""

    def close(self) -> None:
        """End what folds."""


class Feed:
    """Folds records as they are appended. ``position``: of the last folded one; ``closed``: streams are to end.

    ``newest``: the types of the newest events, up to the one at ``position``.

    Args:
        folds: what folds.
        journal: of the log.
        observe: called with what each batch has found, except where the projections are built from position 0.
    """

    def __init__(self, folds: Folds, journal: Journal, observe: Observe = ignored) -> None:
        self._folds, self._observe = folds, observe
        self._journal = journal
        self._changed = asyncio.Event()
        """Set with the next batch, and when the feed is closed; each batch has its own."""
        self._unsettled = 0
        """Batches that were folded since time was settled."""
        self._behind_until_s = -math.inf
        """On the monotonic clock; past: the feed is not behind."""
        self.position = 0
        self.newest: deque[str] = deque(maxlen=_NEWEST)
        self.closed = False

    async def catch_up(self) -> None:
        """Fold the records that the log has now; projections of another log (an older run's file) are dropped first."""
        log = self._journal.log
        self.position, head = await self._journal.outages.outlast(PROJECTIONS, self._folds.head)
        if self.position:
            if await self._journal.outages.outlast(LOG, lambda: log.hash_at(self.position)) != head:
                logger.warning("the projections belong to another log: folding from the start")
                await self._journal.outages.outlast(PROJECTIONS, self._folds.reset)
                self.position = 0
        observe = self._observe if self.position else ignored
        while records := await self._journal.outages.outlast(LOG, lambda: log.read(after=self.position, limit=_BATCH)):
            self._advance(records, await self._folded(records, observe))
            await self._settle()

    async def follow(self) -> None:
        """Fold every further record, those that are there at once in one transaction; runs until cancelled."""
        await self._journal.follow_several(self._fold, consumer="api", after=self.position)

    async def _fold(self, records: Sequence[Recorded]) -> None:
        next_s = time.monotonic() + _BETWEEN_S
        self._advance(records, await self._folded(records, self._observe))
        now_s = time.monotonic()
        behind = len(records) >= _MANY and (len(records) >= _BATCH or now_s > next_s)
        self._behind_until_s = now_s + _BEHIND_S if behind else -math.inf
        if not behind or self._unsettled >= _LATEST_SETTLING:
            await self._settle()
        if 1 < len(records) < _BATCH:
            await asyncio.sleep(max(next_s - time.monotonic(), 0.0))

    def _advance(self, records: Sequence[Recorded], position: int) -> None:
        """Let everybody know of records that were folded; the projections are of ``position`` now."""
        if records[-1].position != position or records[0].position != self.position + 1:
            self.newest.clear()  # another process has folded, too
        if records[-1].position == position:
            self.newest.extend(record.event.type for record in records)
        self.position = position
        self._unsettled += 1
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _folded(self, records: Sequence[Recorded], observe: Observe) -> int:
        """Fold records, which has no effect a second time, and return the position."""
        return await self._journal.outages.outlast(PROJECTIONS, lambda: self._folds.fold(records, observe))

    async def _settle(self) -> None:
        """Settle time as far as the folded records allow."""
        await self._journal.outages.outlast(PROJECTIONS, self._folds.settle)
        self._unsettled = 0

    async def wait_beyond(self, position: int, *, timeout_s: float) -> bool:
        """Wait until a record behind ``position`` has been folded, or the feed is closed; False after the time-out."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.closed and self.position <= position:
                    await self._changed.wait()
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

    async def in_time(self, *, timeout_s: float) -> None:
        """Wait while the feed is behind: events come before what takes the processors from the fold."""
        latest_s = time.monotonic() + timeout_s
        while (left_s := min(self._behind_until_s, latest_s) - time.monotonic()) > 0.0 and not self.closed:
            await self.wait_beyond(self.position, timeout_s=left_s)

    async def close(self) -> None:
        """End all waits, so that streams end."""
        self.closed = True
        self._wake()
