"""Following the log against a real server: every record once, in order, through restarts and rebuilds."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.errors import Unavailable, VersionConflict
from shared.events.union import Recorded
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.log.relay import STREAM, SUBJECT, encode
from tests.nats_server import OpenServer
from tests.shared.collector import Several, following
from tests.shared.samples import node_joined


async def test_records_of_the_table_come_before_new_ones(journal: Journal) -> None:
    await journal.append([node_joined(1), node_joined(2)])
    async with following(journal) as follower:
        await follower.until(2)
        await journal.append([node_joined(3)])
        await follower.until(3)
        await journal.append([node_joined(4), node_joined(5)])
        await follower.until(5)
        assert follower.records == journal.log.read()


async def test_from_a_position_on(journal: Journal) -> None:
    await journal.append([node_joined(number) for number in range(1, 5)])
    async with following(journal, after=3) as follower:
        await follower.until(4)
        await journal.append([node_joined(5)])
        await follower.until(5)
        assert follower.positions == [4, 5]
    # A follower with the same name: its position counts, not that of the durable consumer.
    async with following(journal, after=1) as follower:
        await follower.until(5)
        assert follower.positions == [2, 3, 4, 5]
    async with following(journal, after=5) as follower:
        await journal.append([node_joined(6)])
        await follower.until(6)
        assert follower.positions == [6]


async def test_append_raises_what_the_log_raises(journal: Journal) -> None:
    await journal.append([node_joined(1)])
    with pytest.raises(VersionConflict):
        await journal.append([node_joined(2)], expected={"node/n0": 0})


async def test_several_followers(journal: Journal) -> None:
    async with following(journal, consumer="planner") as one, following(journal, consumer="api.live page") as two:
        for number in range(1, 21):
            await journal.append([node_joined(number)])
        await asyncio.gather(one.until(20), two.until(20))
        assert one.positions == two.positions == list(range(1, 21))


async def test_an_exception_of_handle_is_raised(journal: Journal) -> None:
    seen: list[int] = []

    async def handle(record: Recorded) -> None:
        seen.append(record.position)
        if record.position == 2:
            raise ValueError("two")

    await journal.append([node_joined(1)])
    task = asyncio.create_task(journal.follow(handle, consumer="test", after=0))
    await journal.append([node_joined(2), node_joined(3)])
    with pytest.raises(ValueError, match="two"):
        await task
    assert seen == [1, 2]
    async with following(journal, after=1) as follower:
        await follower.until(3)
        assert follower.positions == [2, 3]


async def test_a_slow_handler_gets_each_record_once(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server delivers an unacknowledged message again; the follower skips it by its position."""
    monkeypatch.setattr("shared.log.journal.ACK_WAIT_S", 0.05)
    seen: list[int] = []
    done = asyncio.Event()

    async def handle(record: Recorded) -> None:
        await asyncio.sleep(0.2)  # four times as long as the server waits
        seen.append(record.position)
        if record.position == 5:
            done.set()

    task = asyncio.create_task(journal.follow(handle, consumer="test", after=0))
    for number in range(1, 6):
        await journal.append([node_joined(number)])
    async with asyncio.timeout(40):
        await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("crash", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_restart_of_the_server(journal: Journal, nats: OpenServer, bus: Bus, crash: bool) -> None:
    async with following(journal) as follower:
        await journal.append([node_joined(1), node_joined(2)])
        await follower.until(2)
        await (nats.kill() if crash else nats.stop())
        # The log takes events without NATS, and followers receive them.
        await journal.append([node_joined(3), node_joined(4)])
        await follower.until(4)
        await nats.start()
        await bus.wait_connected()
        for number in range(5, 10):
            await journal.append([node_joined(number)])
            await follower.until(number)
        assert follower.records == journal.log.read()
    assert await journal.relay() == 9


async def test_a_rebuild_of_the_stream(journal: Journal, bus: Bus) -> None:
    async with following(journal) as follower:
        await journal.append([node_joined(number) for number in range(1, 6)])
        await follower.until(5)
        assert await journal.relay() == 5
        for number in range(6, 10):
            await bus.jetstream.delete_stream(STREAM)
            await journal.append([node_joined(number)])
            assert await journal.relay() == number
            await follower.until(number)
        assert follower.records == journal.log.read()


async def test_what_a_dead_process_left_is_relayed_while_others_append(journal: Journal) -> None:
    async with following(journal) as follower:
        await journal.append([node_joined(1)])
        await follower.until(1)
        other = EventLog(journal.log.url)
        for number in range(2, 12, 2):
            other.append([node_joined(number)])
            await journal.append([node_joined(number + 1)])
            await follower.until(number + 1)
        other.close()
        assert follower.records == journal.log.read()
    assert await journal.relay() == 11


async def test_a_server_that_lost_its_store(tmp_path: Path, log: EventLog) -> None:
    first = OpenServer(tmp_path / "first")
    await first.start()
    bus = await Bus.connect(first.url, credential=first.credential, name="test")
    async with Journal(log, bus) as journal, following(journal) as follower:
        await journal.append([node_joined(1), node_joined(2)])
        await follower.until(2)
        await first.stop()
        async with OpenServer(tmp_path / "second", port=first.port, keys=first.keys):
            await bus.wait_connected()
            await journal.append([node_joined(3)])
            await follower.until(3)
            assert await journal.relay() == 3
            assert follower.records == log.read()
    await bus.close()


async def test_forged_messages_are_not_handled(journal: Journal, bus: Bus) -> None:
    async with following(journal) as follower:
        await journal.append([node_joined(1)])
        await follower.until(1)
        assert await journal.relay() == 1
        (row,) = journal.log.page()
        forged = row._replace(position=2, stream_version=2, data=node_joined(66).canonical())
        await bus.jetstream.publish(f"{SUBJECT}.node.joined", encode(forged))
        await bus.jetstream.publish(f"{SUBJECT}.node.joined", b"\xff")
        await journal.append([node_joined(2)])
        assert await journal.relay() == 2
        await journal.append([node_joined(3)])
        await follower.until(3)
        assert follower.records == journal.log.read()


async def test_a_record_too_large_for_a_message(journal: Journal, bus: Bus) -> None:
    large = node_joined(2).model_copy(update={"domain": "x" * bus.max_payload_bytes})
    async with following(journal) as follower:
        await journal.append([node_joined(1)])
        await follower.until(1)
        await journal.append([large, node_joined(3)])
        await follower.until(3)
        assert follower.records == journal.log.read()


async def test_events_that_another_process_appended_without_relaying(journal: Journal) -> None:
    """A process that died between its commit and its relay."""
    async with following(journal) as follower:
        other = EventLog(journal.log.url)
        other.append([node_joined(1)])
        other.close()
        await follower.until(1)
        async with asyncio.timeout(40):
            while await journal.relay() != 1:
                pass


async def test_a_closed_bus_ends_the_following(log: EventLog, nats: OpenServer) -> None:
    bus = await Bus.connect(nats.url, credential=nats.credential, name="test")
    journal = Journal(log, bus)
    task = asyncio.create_task(journal.follow(lambda record: asyncio.sleep(0), consumer="test", after=0))
    await bus.close()
    with pytest.raises(Unavailable, match="closed"):
        await task


async def test_closing_relays_what_was_appended(log: EventLog, bus: Bus) -> None:
    async with Journal(log, bus) as journal:
        await journal.append([node_joined(1)])
    assert (await bus.jetstream.stream_info(STREAM)).state.last_seq == 1


_FOLLOWER = """
import asyncio, sys
from pathlib import Path
from shared.bus import credentials
from pathlib import Path
from shared.bus import credentials
from shared.bus.connection import Bus
from shared.log import journal
from shared.log.log import EventLog

journal.FETCH_TIMEOUT_S = 1000.0  # it never reads the table

async def main(url, credential, log_url):
    log = EventLog(log_url)
    bus = await Bus.connect(url, credential=credentials.read(Path(credential)), name="follower")

    async def handle(record):
        print(record.position, flush=True)

    await journal.Journal(log, bus).follow(handle, consumer="follower", after=0)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_hears_through_the_stream(journal: Journal, nats: OpenServer) -> None:
    """Each record at once (about 3 ms on an idle machine), and not when the follower reads the table."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", _FOLLOWER, nats.url, str(nats.credential_file), journal.log.url],
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stdout is not None
        for number in range(1, 31):
            await journal.append([node_joined(number)])
            assert int(await process.stdout.readline()) == number
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize(("most", "calls"), [(500, [[1], [2, 3, 4, 5, 6, 7]]), (3, [[1], [2, 3, 4], [5, 6, 7]])])
async def test_who_follows_several_gets_what_is_there_at_once(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, most: int, calls: list[list[int]]
) -> None:
    monkeypatch.setattr("shared.log.journal._MOST_AT_ONCE", most)
    several = Several(journal)
    async with several.following():
        await journal.append([node_joined(1)])
        await several.until(1)
        for number in range(2, 8):
            await journal.append([node_joined(number)])
        assert await journal.relay() == 7
        several.go.set()
        await several.until(7)
    assert several.calls == calls


async def test_who_follows_several_gets_each_record_once(
    journal: Journal, nats: OpenServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the stream is rebuilt, the server restarts, and acknowledgements come late."""
    monkeypatch.setattr("shared.log.journal.ACK_WAIT_S", 0.05)
    several = Several(journal)
    several.go.set()
    async with several.following():
        for number in range(1, 6):
            await journal.append([node_joined(3 * number + part) for part in range(3)])
            await journal.relay()
            if number == 2:
                await bus.jetstream.delete_stream(STREAM)
            if number == 3:
                await nats.kill()
                await nats.start()
                await bus.wait_connected()
        await several.until(15)
    assert [position for call in several.calls for position in call] == list(range(1, 16))
