"""The feed: who waits for an event waits for its fold, and for nothing that follows."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from services.api.store.feed import Feed
from services.api.store.projection_store import Store
from shared.bus.cancellation import cancelled
from shared.log.journal import Journal
from tests.shared.samples import node_joined

WAIT_S = 20.0
"""Far above what an append, a fold and a turn of a thread take."""


class HeldStore(Store):
    """A store that settles nothing until it may."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.settles, self.may_settle = threading.Event(), threading.Event()

    def settle(self) -> None:
        """Settle, once it is allowed to."""
        self.settles.set()
        assert self.may_settle.wait(WAIT_S)
        super().settle()


async def test_who_waits_for_an_event_does_not_wait_until_time_is_settled(journal: Journal, tmp_path: Path) -> None:
    store = HeldStore(f"sqlite:///{tmp_path / 'projections.db'}")
    feed = Feed(store, journal)
    following = asyncio.create_task(feed.follow())
    try:
        await journal.append([node_joined(1)])
        await feed.reach(1, timeout_s=WAIT_S)
        assert await asyncio.to_thread(store.settles.wait, WAIT_S)
        assert store.position() == 1
    finally:
        store.may_settle.set()
        await cancelled(following)
        store.close()
