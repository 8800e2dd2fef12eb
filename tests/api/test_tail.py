"""Streams of events: what is new is read once for all of them, and whoever is behind gets all that is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from services.api import tail
from services.api.feed import Feed
from services.api.store import Store
from services.api.tail import Tail
from shared.errors import Corrupt
from shared.events import TaskSubmitted
from shared.log.journal import Journal
from shared.log.schema import StoredRow
from shared.settings import Settings
from tests.api.kit import START, Server, spec
from tests.shared.samples import node_joined


@pytest.fixture
async def feed(journal: Journal, settings: Settings) -> AsyncIterator[Feed]:
    """A feed that has folded ten events."""
    await journal.append([node_joined(number) for number in range(1, 11)])
    store = Store(f"sqlite:///{settings.run_dir / 'projections.db'}")
    feed = Feed(store, journal)
    await feed.catch_up()
    yield feed
    store.close()


def positions(found: bytes) -> list[int]:
    return [int(line[4:]) for line in found.decode().splitlines() if line.startswith("id: ")]


async def test_streams_share_what_was_read(feed: Feed, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Tail(journal, feed)
    read = shared._read  # the log's own ``page`` is called by the relay as well
    pages: list[int] = []

    def noted(after: int, until: int) -> Sequence[Any]:
        pages.append(after)
        return read(after, until)

    monkeypatch.setattr(shared, "_read", noted)
    found = await asyncio.gather(*(shared.after(7) for _ in range(20)))
    assert [(positions(events), position) for events, position in found] == [([8, 9, 10], 10)] * 20
    assert pages == [7]
    assert await shared.after(9) == (found[0][0][found[0][0].index(b"id: 10") :], 10)
    assert pages == [7]


@pytest.mark.parametrize("after", [0, 3, 9, 10, 11, 2**62])
async def test_whoever_is_behind_gets_all_that_is_missing(feed: Feed, journal: Journal, after: int) -> None:
    shared = Tail(journal, feed)
    assert positions((await shared.after(8))[0]) == [9, 10]
    found, position = await shared.after(after)
    assert positions(found) == list(range(after + 1, 11))
    assert position == max(after, 10)
    assert positions((await shared.after(8))[0]) == [9, 10]


async def test_what_is_remembered_is_bounded(feed: Feed, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MOST_BYTES", 1500)
    monkeypatch.setattr(tail, "MOST_EVENTS", 4)
    shared, position = Tail(journal, feed), 0
    seen: list[int] = []
    while position < 10:
        found, position = await shared.after(position)
        seen += positions(found)
        assert sum(len(event.whole()) for event in shared._events) <= 1500
    assert seen == list(range(1, 11))
    assert positions((await shared.after(2))[0]) == [3, 4, 5, 6]


async def test_a_stream_shows_nothing_that_the_lists_do_not_have(feed: Feed, journal: Journal) -> None:
    shared = Tail(journal, feed)
    await journal.append([node_joined(11)])
    assert positions((await shared.after(9))[0]) == [10]
    await feed.catch_up()
    assert positions((await shared.after(10))[0]) == [11]


async def test_brief_streams_have_positions_and_types(feed: Feed, journal: Journal) -> None:
    event = b"id: %d\nevent: node.joined\ndata: {}\n\n"
    shared = Tail(journal, feed)
    assert await shared.after(8, brief=True) == (event % 9 + event % 10, 10)
    feed.newest.popleft()  # an event that the feed does not remember any more
    assert await shared.after(0, brief=True) == (b"".join(event % number for number in range(1, 11)), 10)


async def test_brief_streams_wait_for_no_reading(feed: Feed, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MOST_EVENTS", 4)
    shared, position, seen = Tail(journal, feed), 0, list[int]()
    async with shared._reading:
        while position < 10:
            (found, position) = await asyncio.wait_for(shared.after(position, brief=True), 30)
            seen += positions(found)
    assert seen == list(range(1, 11))
    assert await shared.after(10, brief=True) == (b"", 10)


async def test_an_event_that_cannot_be_read_ends_the_streams_that_show_it(
    feed: Feed, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event_json(row: StoredRow) -> str:
        if row.position == 9:
            raise Corrupt("no JSON")
        return "{}"

    monkeypatch.setattr(tail, "event_json", event_json)
    shared = Tail(journal, feed)
    assert positions((await shared.after(6, brief=True))[0]) == [7, 8, 9, 10]
    found, position = await shared.after(6)  # those before it are sent first
    assert (positions(found), position) == ([7, 8], 8)
    with pytest.raises(Corrupt):
        await shared.after(8)
    assert positions((await shared.after(9))[0]) == [10]


async def test_two_streams_of_one_gateway_get_every_event_once(api: Server) -> None:
    async def first_ids(count: int) -> list[str]:
        ids: list[str] = []
        async with api.http.stream("GET", "/v1/events?follow=true") as stream:
            async for line in stream.aiter_lines():
                ids += [line[4:]] if line.startswith("id: ") else []
                if len(ids) == count:
                    break
        return ids

    async with asyncio.timeout(40), asyncio.TaskGroup() as group:
        reading = [group.create_task(first_ids(12)) for _ in range(2)]
        for number in range(12):
            await api.join(f"n{number}")
    assert [task.result() for task in reading] == [[str(number) for number in range(1, 13)]] * 2


async def test_a_stream_of_some_types_goes_on_over_the_others(feed: Feed, journal: Journal) -> None:
    await journal.append([TaskSubmitted(event_id="t", occurred_at=START, task="gpt", spec=spec())])
    await feed.catch_up()
    shared = Tail(journal, feed)
    for brief in (False, True):
        assert await shared.after(8, brief=brief, types=frozenset({"cluster.configured"})) == (b"", 11)
        found, position = await shared.after(8, brief=brief, types=frozenset({"task.submitted"}))
        assert (positions(found), position) == ([11], 11)
