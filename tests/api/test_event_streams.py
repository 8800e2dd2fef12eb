"""Streams of events: whoever is behind gets all that is missing, and nothing that the lists do not have."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.api.routers import events
from services.api.routers.events import _encoded
from services.api.store.feed import Feed
from services.api.store.projection_store import Store
from shared.errors import Corrupt
from shared.events.union import TaskSubmitted
from shared.log.journal import Journal
from shared.log.schema import StoredRow
from tests.api.kit import START, Server, spec
from tests.shared.samples import node_joined


@pytest.fixture
async def ten(journal: Journal) -> Journal:
    """A journal of ten events."""
    await journal.append([node_joined(number) for number in range(1, 11)])
    return journal


def positions(found: str) -> list[int]:
    return [int(line[4:]) for line in found.splitlines() if line.startswith("id: ")]


@pytest.mark.parametrize(("after", "until"), [(0, 10), (3, 10), (9, 10), (2, 6)])
async def test_a_part_of_the_log_is_all_events_in_it(ten: Journal, after: int, until: int) -> None:
    found, position = _encoded(ten.log, after, until, False, ())
    assert (positions(found), position) == (list(range(after + 1, until + 1)), until)


async def test_brief_streams_have_positions_and_types(ten: Journal) -> None:
    event = "id: %d\nevent: node.joined\ndata: {}\n\n"
    assert _encoded(ten.log, 8, 10, True, ()) == (event % 9 + event % 10, 10)


@pytest.mark.parametrize("brief", [False, True])
async def test_a_stream_of_some_types_goes_on_over_the_others(ten: Journal, brief: bool) -> None:
    await ten.append([TaskSubmitted(event_id="t", occurred_at=START, task="gpt", spec=spec())])
    assert _encoded(ten.log, 8, 11, brief, ["cluster.configured"]) == ("", 11)
    found, position = _encoded(ten.log, 8, 11, brief, ["task.submitted"])
    assert (positions(found), position) == ([11], 11)


async def test_an_event_that_cannot_be_read_ends_the_streams_that_show_it(
    ten: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event_json(row: StoredRow) -> str:
        if row.position == 9:
            raise Corrupt("no JSON")
        return "{}"

    monkeypatch.setattr(events, "event_json", event_json)
    assert positions(_encoded(ten.log, 6, 10, True, ())[0]) == [7, 8, 9, 10]
    found, position = _encoded(ten.log, 6, 10, False, ())  # those before it are sent first
    assert (positions(found), position) == ([7, 8], 8)
    with pytest.raises(Corrupt):
        _encoded(ten.log, 8, 10, False, ())
    assert positions(_encoded(ten.log, 9, 10, False, ())[0]) == [10]


async def ids(api: Server, query: str, count: int) -> list[str]:
    """Return the positions of the first events of a stream."""
    found: list[str] = []
    async with api.http.stream("GET", f"/v1/events?follow=true{query}") as stream:
        async for line in stream.aiter_lines():
            found += [line[4:]] if line.startswith("id: ") else []
            if len(found) == count:
                return found
    return found


async def test_two_streams_of_one_gateway_get_every_event_once(api: Server) -> None:
    async with asyncio.timeout(40), asyncio.TaskGroup() as group:
        reading = [group.create_task(ids(api, "", 12)) for _ in range(2)]
        for number in range(12):
            await api.join(f"n{number}")
    assert [task.result() for task in reading] == [[str(number) for number in range(1, 13)]] * 2


async def test_a_stream_that_is_far_behind_takes_the_log_in_parts(api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        await api.join(f"n{number}")
    monkeypatch.setattr(events, "MOST_EVENTS", 5)
    async with asyncio.timeout(40):
        assert await ids(api, "&after=2&brief=true", 10) == [str(number) for number in range(3, 13)]


async def test_a_stream_shows_nothing_that_the_lists_do_not_have(ten: Journal, tmp_path: Path) -> None:
    """A feed that has not folded the newest event wakes nobody."""
    store = Store(f"sqlite:///{tmp_path / 'projections.db'}")
    feed = Feed(store, ten)
    await feed.catch_up()
    await ten.append([node_joined(11)])
    assert not await feed.wait_beyond(10, timeout_s=0.01)
    await feed.catch_up()
    assert await feed.wait_beyond(10, timeout_s=0.01)
    store.close()
