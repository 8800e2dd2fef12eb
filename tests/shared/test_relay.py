"""The relay against a real server: sequence equals position, through losses and contradictions of the stream."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, Header, RawStreamMsg, StreamConfig, StreamInfo

from shared.archive.cutover import cut
from shared.archive.writing import archive
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.log import relay as relays
from shared.log.archived import verified_base
from shared.log.log import EventLog
from shared.log.relay import HASH_HEADER, STREAM, SUBJECT, Relay, decode, encode
from tests.condition import until
from tests.nats_server import OpenServer
from tests.shared.samples import node_joined, plan


async def messages(bus: Bus) -> list[RawStreamMsg]:
    info = await bus.jetstream.stream_info(STREAM)
    return [await bus.jetstream.get_msg(STREAM, sequence) for sequence in range(1, info.state.last_seq + 1)]


async def assert_equal(bus: Bus, log: EventLog) -> None:
    """Assert that the stream has the log's events, one by one."""
    held = await messages(bus)
    assert [decode(message.data or b"") for message in held] == log.read()
    assert [message.seq for message in held] == [record.position for record in log.read()]


async def test_sequence_is_position(log: EventLog, bus: Bus) -> None:
    log.append([node_joined(1), plan(2, {1: 0.5, 2: 0.1})])
    relay = Relay(log, bus)
    assert await relay.run() == 2
    await assert_equal(bus, log)
    held = await messages(bus)
    assert [message.subject for message in held] == [f"{SUBJECT}.node.joined", f"{SUBJECT}.plan.decided"]
    headers = held[1].headers
    assert headers is not None
    assert headers[Header.MSG_ID] == log.read()[1].hash
    assert headers[Header.EXPECTED_LAST_SEQUENCE] == "1"
    assert headers[HASH_HEADER] == log.read()[1].hash


async def test_running_again_adds_nothing(log: EventLog, bus: Bus) -> None:
    relay = Relay(log, bus)
    assert await relay.run() == 0
    log.append([node_joined(1)])
    assert [await relay.run(), await relay.run(), await Relay(log, bus).run()] == [1, 1, 1]
    log.append([node_joined(2), node_joined(3)])
    assert await relay.run() == 3
    await assert_equal(bus, log)


async def test_a_known_id_with_a_stale_sequence_is_error_10071(log: EventLog, bus: Bus) -> None:
    """The relay depends on this answer of the server."""
    log.append([node_joined(1), node_joined(2)])
    await Relay(log, bus).run()
    headers: dict[str, str] = {Header.MSG_ID: log.read()[0].hash, Header.EXPECTED_LAST_SEQUENCE: "0"}
    with pytest.raises(nats.js.errors.BadRequestError) as caught:
        await bus.jetstream.publish(f"{SUBJECT}.node.joined", b"", headers=headers)
    assert caught.value.err_code == 10071


async def test_concurrent_relays_are_harmless(log: EventLog, bus: Bus, nats: OpenServer) -> None:
    url = log.url
    buses = [await Bus.connect(nats.url, credential=nats.credential, name=f"relay-{index}") for index in range(4)]
    logs = [EventLog(url) for _ in buses]
    relays = [Relay(own_log, own_bus) for own_log, own_bus in zip(logs, buses, strict=True)]
    for batch in range(6):
        first = 1 + 10 * batch
        log.append([node_joined(number) for number in range(first, first + 10)])
        sequences = await asyncio.gather(*(relay.run() for relay in relays))
        assert sequences == [10 * (batch + 1)] * 4
    await assert_equal(bus, log)
    for own_bus in buses:
        await own_bus.close()
    for own_log in logs:
        own_log.close()


async def test_a_lost_stream_is_rebuilt(log: EventLog, bus: Bus) -> None:
    log.append([node_joined(number) for number in range(1, 6)])
    relay = Relay(log, bus)
    await relay.run()
    await bus.jetstream.delete_stream(STREAM)
    log.append([node_joined(6)])
    assert await relay.run() == 6
    await assert_equal(bus, log)


async def test_a_stream_with_more_than_the_log_is_rebuilt(
    log: EventLog, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    log.append([node_joined(1)])
    relay = Relay(log, bus)
    await relay.run()
    await bus.jetstream.publish(f"{SUBJECT}.forged", b"{}")
    assert await relay.run() == 1
    await assert_equal(bus, log)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [f"stream {STREAM} contradicts the log (it has 2 messages, the log fewer): deleted and rebuilt"]


async def test_a_stream_of_other_events_is_rebuilt(log: EventLog, bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    await bus.jetstream.add_stream(StreamConfig(name=STREAM, subjects=[f"{SUBJECT}.>"]))
    for _ in range(2):
        await bus.jetstream.publish(f"{SUBJECT}.foreign", b"{}")
    log.append([node_joined(number) for number in range(1, 4)])
    assert await Relay(log, bus).run() == 3
    await assert_equal(bus, log)
    assert "sequence 2 is not the event at that position" in caplog.text


async def test_a_stream_with_holes_is_rebuilt(log: EventLog, bus: Bus) -> None:
    await bus.jetstream.add_stream(StreamConfig(name=STREAM, subjects=[f"{SUBJECT}.>"]))
    log.append([node_joined(1), node_joined(2)])
    relay = Relay(log, bus)
    await relay.run()
    await bus.jetstream.purge_stream(STREAM)  # removes the messages, keeps the last sequence
    assert await relay.run() == 2
    await assert_equal(bus, log)


async def test_the_stream_refuses_to_lose_messages(log: EventLog, bus: Bus) -> None:
    log.append([node_joined(1)])
    await Relay(log, bus).run()
    with pytest.raises(nats.js.errors.APIError):
        await bus.jetstream.purge_stream(STREAM)
    with pytest.raises(nats.js.errors.APIError):
        await bus.jetstream.delete_msg(STREAM, 1)
    await assert_equal(bus, log)


async def test_a_record_too_large_for_a_message_keeps_its_place(log: EventLog, bus: Bus) -> None:
    large = node_joined(2).model_copy(update={"domain": "x" * bus.max_payload_bytes})
    log.append([node_joined(1), large, node_joined(3)])
    assert await Relay(log, bus).run() == 3
    held = await messages(bus)
    assert not held[1].data
    assert decode(held[2].data or b"") == log.read()[2]


async def test_relayed_messages_survive_a_kill_of_the_server(log: EventLog, bus: Bus, nats: OpenServer) -> None:
    log.append([node_joined(number) for number in range(1, 21)])
    relay = Relay(log, bus)
    await relay.run()
    await nats.kill()
    await nats.start()
    await bus.wait_connected()
    assert (await bus.jetstream.stream_info(STREAM)).state.last_seq == 20
    log.append([node_joined(21)])
    assert await relay.run() == 21
    await assert_equal(bus, log)


@pytest.mark.parametrize("lacking", [1, 2, 50])
async def test_a_stream_that_stores_nothing_any_more_is_rebuilt(
    log: EventLog, bus: Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: int
) -> None:
    """So is that of a real server whose disk was full (``tests/cluster/test_full_disks.py``).

    It does not answer the publication of the next message, and refuses all behind it, since it lacks that one.
    """
    relay = Relay(log, bus)
    log.append([node_joined(1)])
    assert await relay.run() == 1
    stuck = (await bus.jetstream.stream_info(STREAM)).created
    publish, publish_last = Bus.send, JetStreamContext.publish

    async def is_stored(context: JetStreamContext, headers: dict[str, str]) -> bool:
        info = await context.stream_info(STREAM)
        return info.created != stuck or headers[Header.EXPECTED_LAST_SEQUENCE] != str(info.state.last_seq)

    async def publish_unless_stuck(own_bus: Bus, subject: str, data: bytes, headers: dict[str, str]) -> None:
        if await is_stored(own_bus.jetstream, headers):
            await publish(own_bus, subject, data, headers)

    async def publish_last_unless_stuck(context: JetStreamContext, *arguments: Any, **options: Any) -> Any:
        if not await is_stored(context, options["headers"]):
            raise nats.errors.TimeoutError
        return await publish_last(context, *arguments, **options)

    monkeypatch.setattr(Bus, "send", publish_unless_stuck)
    monkeypatch.setattr(JetStreamContext, "publish", publish_last_unless_stuck)
    rows = log.append_rows([node_joined(number) for number in range(2, 2 + lacking)])
    async with asyncio.timeout(20):
        for fresh in (rows, ()):  # a slow server is no reason
            with pytest.raises(Unavailable):
                await relay.run(fresh)
        monkeypatch.setattr(relays, "STUCK_S", 0.0)
        assert await relay.run() == 1 + lacking
    assert "stores nothing (it has not taken position 2 for 0 s): deleted and rebuilt" in caplog.text
    await assert_equal(bus, log)


async def test_a_stream_that_another_relay_has_rebuilt_is_left(
    log: EventLog, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All services find it stuck at about the same time."""
    relay, other = Relay(log, bus), Relay(log, bus)
    log.append([node_joined(1)])
    await relay.run()
    stuck = (await bus.jetstream.stream_info(STREAM)).created
    publish = JetStreamContext.publish
    waited: list[Any] = []
    rebuilt: list[Any] = []

    async def publish_unless_stuck(context: JetStreamContext, *arguments: Any, **options: Any) -> Any:
        if (await context.stream_info(STREAM)).created != stuck:
            return await publish(context, *arguments, **options)
        waited.append(options["headers"])
        if len(waited) == 2:  # the other relay is faster
            await context.delete_stream(STREAM)
            await other.run()
            rebuilt.append((await context.stream_info(STREAM)).created)
        raise nats.errors.TimeoutError

    monkeypatch.setattr(JetStreamContext, "publish", publish_unless_stuck)
    monkeypatch.setattr(relays, "STUCK_S", 0.0)
    log.append([node_joined(2)])
    with pytest.raises(Unavailable):
        await relay.run()
    assert await relay.run() == 2
    assert len(waited) == 2
    assert (await bus.jetstream.stream_info(STREAM)).created == rebuilt[0]
    await assert_equal(bus, log)


async def test_a_stream_that_takes_no_more_is_left_and_goes_on_later(log: EventLog, bus: Bus) -> None:
    """Whoever relays is told, in place of publishing the same rows without end."""
    full = StreamConfig(name=STREAM, subjects=[f"{SUBJECT}.>"], max_msgs=1, discard=DiscardPolicy.NEW)
    await bus.jetstream.add_stream(full)
    log.append([node_joined(1)])
    relay = Relay(log, bus)
    assert await relay.run() == 1
    log.append([node_joined(2), node_joined(3)])
    async with asyncio.timeout(20):
        with pytest.raises(Unavailable):
            await relay.run()
        await bus.jetstream.update_stream(full.evolve(max_msgs=-1))
        assert await relay.run() == 3
    await assert_equal(bus, log)


async def test_of_many_rows_on_their_way_the_last_is_acknowledged(
    log: EventLog, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledged = []
    publish = JetStreamContext.publish

    async def counted(context: JetStreamContext, *arguments: Any, **options: Any) -> Any:
        ack = await publish(context, *arguments, **options)
        acknowledged.append(ack.seq)
        return ack

    monkeypatch.setattr(JetStreamContext, "publish", counted)
    log.append([node_joined(number) for number in range(1, 101)])
    assert await Relay(log, bus).run() == 100
    assert len(acknowledged) < 10
    assert acknowledged[-1] == 100
    await assert_equal(bus, log)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("lost", ["message", "last message", "acknowledgement"])
async def test_what_is_lost_among_many_rows_is_published_again(
    log: EventLog, bus: Bus, monkeypatch: pytest.MonkeyPatch, lost: str, fresh: bool
) -> None:
    publish, publish_last = Bus.send, JetStreamContext.publish
    losing = [True]

    async def losing_one(own_bus: Bus, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        if lost == "message" and headers and headers[Header.EXPECTED_LAST_SEQUENCE] == "6" and losing:
            losing.clear()
            return
        await publish(own_bus, subject, data, headers)

    async def losing_last(context: JetStreamContext, *arguments: Any, **options: Any) -> Any:
        if lost != "message" and losing:
            losing.clear()
            if lost == "acknowledgement":
                await publish_last(context, *arguments, **options)
            raise nats.errors.TimeoutError
        return await publish_last(context, *arguments, **options)

    relay = Relay(log, bus)
    await relay.run()
    rows = log.append_rows([node_joined(number) for number in range(1, 21)])
    monkeypatch.setattr(Bus, "send", losing_one)
    monkeypatch.setattr(JetStreamContext, "publish", losing_last)
    if lost == "message" or fresh:  # the stream is compared with the table, and gets what it lacks
        assert await relay.run(rows if fresh else ()) == 20
    else:
        with pytest.raises(Unavailable):
            await relay.run()
        assert await relay.run() == 20
    assert not losing
    await assert_equal(bus, log)


async def test_what_was_just_appended_takes_no_comparison(
    log: EventLog, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = Relay(log, bus)
    log.append([node_joined(1)])
    assert await relay.run() == 1
    fresh = log.append_rows([node_joined(2), node_joined(3)])

    async def not_asked(*arguments: Any, **options: Any) -> Any:
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(JetStreamContext, "stream_info", not_asked)
        assert await relay.run(fresh) == 3
    await assert_equal(bus, log)
    assert await relay.run(fresh) == 3  # it is there already
    await assert_equal(bus, log)


@pytest.mark.parametrize("stream", ["none", "behind", "ahead", "other", "older"])
async def test_what_was_just_appended_where_the_stream_is_elsewhere(log: EventLog, bus: Bus, stream: str) -> None:
    log.append([node_joined(1), node_joined(2)])
    if stream == "behind":  # of a service that died before its relay
        await Relay(log, bus).run()
        log.append([node_joined(3)])
    elif stream == "other":
        await bus.jetstream.add_stream(StreamConfig(name=STREAM, subjects=[f"{SUBJECT}.>"]))
        for _ in range(2):
            await bus.jetstream.publish(f"{SUBJECT}.foreign", b"{}")
    elif stream == "older":  # of a relay whose messages have the event's id
        for row in log.page():
            headers: dict[str, str] = {Header.MSG_ID: row.event_id, HASH_HEADER: row.hash}
            if row.position == 1:
                await bus.jetstream.add_stream(StreamConfig(name=STREAM, subjects=[f"{SUBJECT}.>"]))
            await bus.jetstream.publish(f"{SUBJECT}.node.joined", encode(row), headers=headers)
    fresh = log.append_rows([node_joined(4)])
    if stream == "ahead":  # another relay was faster
        log.append([node_joined(5)])
        await Relay(log, bus).run()
    assert await Relay(log, bus).run(fresh) == log.last_position()
    await assert_equal(bus, log)


async def test_keeping_up_asks_the_server_nothing_while_nothing_changes(
    log: EventLog, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    compare = JetStreamContext.stream_info

    async def counted(self: JetStreamContext, name: str, **rest: Any) -> Any:
        asked.append(name)
        return await compare(self, name, **rest)

    monkeypatch.setattr(JetStreamContext, "stream_info", counted)
    relay = Relay(log, bus)
    log.append([node_joined(1)])
    assert [await relay.keep_up() for _ in range(3)] == [1, 1, 1]
    assert len(asked) == 1
    log.append([node_joined(2)])  # by another process
    assert [await relay.keep_up() for _ in range(3)] == [2, 2, 2]
    assert len(asked) == 2
    assert await relay.run(log.append_rows([node_joined(3)])) == 3
    assert await relay.keep_up() == 3
    assert len(asked) == 2  # the publication has shown the equality


async def test_keeping_up_leaves_rows_to_another_relay_while_that_goes_on(log: EventLog, bus: Bus) -> None:
    relay, other = Relay(log, bus), Relay(log, bus)
    log.append([node_joined(1)])
    assert await relay.keep_up() == 1
    await other.run(log.append_rows([node_joined(2)]))
    log.append([node_joined(3)])  # of the other process, on its way
    assert await relay.keep_up() == 2
    assert (await bus.jetstream.stream_info(STREAM)).state.last_seq == 2
    assert await relay.keep_up() == 3  # the other one has stopped
    await assert_equal(bus, log)


async def test_keeping_up_compares_on_a_new_connection_and_after_a_while(
    log: EventLog, bus: Bus, nats: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append([node_joined(1)])
    relay = Relay(log, bus)
    await relay.keep_up()
    await bus.jetstream.delete_stream(STREAM)
    await nats.kill()
    await nats.start()
    await bus.wait_connected()
    assert await relay.keep_up() == 1
    await assert_equal(bus, log)
    monkeypatch.setattr(relays, "COMPARE_INTERVAL_S", 0.0)
    await relay.run()
    await bus.jetstream.delete_stream(STREAM)
    assert await relay.keep_up() == 1
    await assert_equal(bus, log)


async def test_the_stream_of_a_cut_log_begins_behind_its_base(bus: Bus, tmp_path: Path) -> None:
    url, folder = f"sqlite:///{tmp_path / 'cut.db'}", tmp_path / "segments"
    with closing(EventLog(url)) as log:
        log.append([node_joined(number) for number in range(1, 9)])
        assert await Relay(log, bus).run() == 8
        archive(log, folder, 6)
    cut(url, verified_base(folder, 5))
    with closing(EventLog(url)) as log:
        relay = Relay(log, bus)
        assert await relay.run() == 8  # the stream that began at 1 is made anew
        await assert_begins_at(6, bus, log)
        assert await relay.run(log.append_rows([node_joined(9)])) == 9
        await bus.jetstream.delete_stream(STREAM)
        assert await relay.run(log.append_rows([node_joined(10)])) == 10
        await assert_begins_at(6, bus, log)
        archive(log, folder, 11)
    cut(url, verified_base(folder, 10))
    with closing(EventLog(url)) as log:
        relay = Relay(log, bus)
        assert [await relay.run(), await relay.run()] == [10, 10]
        state = (await bus.jetstream.stream_info(STREAM)).state
        assert (state.messages, state.last_seq) == (0, 10)
        assert await relay.run(log.append_rows([node_joined(11)])) == 11
        await assert_begins_at(11, bus, log)


async def test_a_stream_whose_files_are_still_being_deleted_is_built_once_they_are_gone(
    bus: Bus, nats: OpenServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the place of its folder has the server refuse the stream, as the rest of a deleted one does."""
    with closing(EventLog(f"sqlite:///{tmp_path / 'log.db'}")) as log:
        log.append([node_joined(1)])
        relay = Relay(log, bus)
        assert await relay.run() == 1
        (place,) = nats.directory.rglob(f"streams/{STREAM}")
        (place.parent / "kept").touch()  # the server removes the folder of streams with the last one
        await bus.jetstream.delete_stream(STREAM)
        await until(lambda: not place.exists())
        place.touch()
        add_stream, tries = JetStreamContext.add_stream, asyncio.Semaphore(0)

        async def counted(context: JetStreamContext, config: StreamConfig) -> StreamInfo:
            try:
                return await add_stream(context, config)
            finally:
                tries.release()

        monkeypatch.setattr(JetStreamContext, "add_stream", counted)
        running = asyncio.create_task(relay.run())
        async with asyncio.timeout(20):
            await tries.acquire()
        assert not running.done()
        place.unlink(missing_ok=True)  # the server itself may have removed it
        assert await running == 1


async def assert_begins_at(first: int, bus: Bus, log: EventLog) -> None:
    """Assert that the stream has the events from a position on."""
    state = (await bus.jetstream.stream_info(STREAM)).state
    assert (state.first_seq, state.messages) == (first, log.last_position() - first + 1)
    held = [await bus.jetstream.get_msg(STREAM, sequence) for sequence in range(first, state.last_seq + 1)]
    assert [decode(message.data or b"") for message in held] == log.read(after=first - 1)
