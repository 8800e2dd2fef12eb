"""The feed: who waits for an event waits for its fold, and for nothing that follows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.api import feed as feeds
from services.api.feed import Feed
from services.api.store import Store
from shared.cancellation import cancelled
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


class CountingStore(Store):
    """A store that counts how often time may be settled."""

    settles = 0

    def settle(self) -> None:
        """Count."""
        self.settles += 1


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[CountingStore]:
    store = CountingStore(f"sqlite:///{tmp_path / 'projections.db'}")
    yield store
    store.close()


def fill_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one record be a full batch, behind which more may wait."""
    monkeypatch.setattr(feeds, "_MANY", 1)
    monkeypatch.setattr(feeds, "_BATCH", 1)


async def test_a_feed_that_is_behind_folds_some_batches_before_it_settles_time(
    journal: Journal, counting: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(counting, journal)
    records = await journal.append([node_joined(number) for number in range(1, 10)])
    await feed._fold(records[:1])
    assert counting.settles == 1
    fill_batches(monkeypatch)
    settles = []
    for record in records[1:]:
        await feed._fold([record])
        settles.append(counting.settles - 1)
    assert settles == [0, 0, 0, 1, 1, 1, 1, 2]


async def test_who_leaves_the_events_first_waits_until_the_feed_has_caught_up(
    journal: Journal, counting: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(counting, journal)
    records = await journal.append([node_joined(number) for number in range(1, 5)])
    await feed._fold(records[:1])
    await feed.in_time(timeout_s=WAIT_S)  # it never was behind
    with monkeypatch.context() as full:
        fill_batches(full)
        full.setattr(feeds, "_BEHIND_S", 2 * WAIT_S)
        await feed._fold(records[1:2])
        waiting = asyncio.create_task(feed.in_time(timeout_s=WAIT_S))
        await feed._fold(records[2:3])
    await feed.in_time(timeout_s=0.01)
    assert not waiting.done()
    await feed._fold(records[3:])
    async with asyncio.timeout(WAIT_S / 2):
        await waiting


async def test_a_feed_that_gets_no_more_events_is_not_behind(
    journal: Journal, counting: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(counting, journal)
    fill_batches(monkeypatch)
    await feed._fold(await journal.append([node_joined(1)]))
    async with asyncio.timeout(WAIT_S / 2):
        await feed.in_time(timeout_s=WAIT_S)
    monkeypatch.setattr(feeds, "_BEHIND_S", 2 * WAIT_S)
    await feed._fold(await journal.append([node_joined(2)]))
    await feed.close()
    async with asyncio.timeout(WAIT_S / 2):
        await feed.in_time(timeout_s=WAIT_S)


async def test_the_feed_knows_the_types_of_the_newest_events(
    journal: Journal, counting: CountingStore, tmp_path: Path
) -> None:
    feed = Feed(counting, journal)
    records = await journal.append([node_joined(number) for number in range(1, 6)])
    await feed._fold(records[:2])
    await feed._fold(records[2:3])
    assert list(feed.newest) == ["node.joined"] * 3
    other = Store(f"sqlite:///{tmp_path / 'projections.db'}")
    other.fold(records)
    other.close()
    await feed._fold(records[3:4])
    assert (feed.position, list(feed.newest)) == (5, [])  # it has not seen the event at its position
