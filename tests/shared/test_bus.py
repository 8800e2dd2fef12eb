"""The bus with a NATS server: order, concurrency, errors, restarts."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
from pathlib import Path

import nkeys
import pytest

from shared.bus.connection import Bus
from shared.errors import NoReceiver, Unavailable
from tests.condition import until
from tests.nats_server import OpenServer

LIMIT_S = 30.0


async def test_messages_come_one_at_a_time_in_order(bus: Bus) -> None:
    got: list[tuple[str, bytes]] = []
    running = 0
    done = asyncio.Event()

    async def handle(subject: str, data: bytes) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        got.append((subject, data))
        running -= 1
        if len(got) == 100:
            done.set()

    await bus.listen("test.>", handle)
    for number in range(100):
        await bus.send(f"test.{number % 3}", str(number).encode())
    async with asyncio.timeout(40):
        await done.wait()
    assert got == [(f"test.{number % 3}", str(number).encode()) for number in range(100)]


async def test_a_handler_that_fails_gets_the_next_message(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    got: list[bytes] = []
    done = asyncio.Event()

    async def handle(_: str, data: bytes) -> None:
        got.append(data)
        if data == b"bad":
            raise ValueError("bad message")
        done.set()

    await bus.listen("test", handle)
    await bus.send("test", b"bad")
    await bus.send("test", b"good")
    async with asyncio.timeout(40):
        await done.wait()
    assert got == [b"bad", b"good"]
    assert "ValueError: bad message" in caplog.text


async def test_requests_are_served_concurrently(bus: Bus, nats: OpenServer) -> None:
    both = asyncio.Barrier(2)

    async def handle(data: bytes) -> bytes:
        await both.wait()  # the first answer waits for the second request
        return data.upper()

    await bus.answer("test", lambda _, data: handle(data))
    other = await Bus.connect(nats.url, credential=nats.credential, name="other")
    answers = await asyncio.gather(*(other.request("test", text, timeout_s=40) for text in (b"a", b"b")))
    assert answers == [b"A", b"B"]
    await other.close()


async def test_of_a_group_one_answers_each_request(bus: Bus) -> None:
    asked: list[str] = []
    for member in ("one", "other"):

        async def answer(_: str, data: bytes, member: str = member) -> bytes:
            asked.append(member)
            return data

        await bus.answer("test.shared", answer, "group")
    for number in range(20):
        assert await bus.request("test.shared", b"%d" % number, timeout_s=LIMIT_S) == b"%d" % number
    await bus.wait_connected()
    assert (len(asked), {*asked}) == (20, {"one", "other"})


async def test_requests_without_an_answer(bus: Bus) -> None:
    async def fail(data: bytes) -> bytes:
        raise ValueError(data)

    await bus.answer("test.fails", lambda _, data: fail(data))
    with pytest.raises(Unavailable, match=r"nobody answers on test\.nobody"):
        await bus.request("test.nobody", b"", timeout_s=40)
    with pytest.raises(Unavailable, match=r"no answer on test\.fails within 0\.1 s"):
        await bus.request("test.fails", b"", timeout_s=0.1)


async def test_a_cancelled_request_is_cancelled_even_if_the_answer_is_there(bus: Bus) -> None:
    """``asyncio.wait_for`` of Python 3.11 drops a cancellation that comes together with the result."""
    answered = asyncio.Event()

    async def handle(data: bytes) -> bytes:
        answered.set()
        return data

    await bus.answer("test", lambda _, data: handle(data))
    finished = 0

    async def ask() -> None:
        nonlocal finished
        await bus.request("test", b"", timeout_s=40)
        finished += 1

    async def cancel_after(turns: int) -> None:
        answered.clear()
        task = asyncio.create_task(ask())
        await answered.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        before = finished
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
            assert finished == before

    for turns in range(200):
        await cancel_after(turns % 40)


async def test_a_restart_of_the_server(nats: OpenServer, caplog: pytest.LogCaptureFixture) -> None:
    bus = await Bus.connect(nats.url, credential=nats.credential, name="test")
    other = await Bus.connect(nats.url, credential=nats.credential, name="other")

    async def echo(data: bytes) -> bytes:
        return data

    await bus.answer("echo", lambda _, data: echo(data))
    await nats.kill()
    await nats.start()
    await bus.wait_connected()
    await other.wait_connected()
    assert bus.connected
    assert await other.request("echo", b"x", timeout_s=40) == b"x"
    assert "bus test: connection lost" in caplog.text
    assert "bus test: connected again" in caplog.text
    await bus.close()
    await other.close()


async def test_whoever_gives_up_waiting_for_the_end_of_a_connection_does_not_keep_it(nats: OpenServer) -> None:
    """A second signal cancels a service while it closes the bus; a client that stays open tries to reconnect for ever.

    The server is suspended, so that to send pending messages takes a second.
    """
    bus = await Bus.connect(nats.url, credential=nats.credential, name="test")
    os.kill(nats.pid, signal.SIGSTOP)
    try:
        closing = asyncio.create_task(bus.close())
        for _ in range(20):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    finally:
        os.kill(nats.pid, signal.SIGCONT)
    assert bus.closed


async def test_an_answer_that_went_with_the_connection_is_not_waited_for(bus: Bus, nats: OpenServer) -> None:
    other = await Bus.connect(nats.url, credential=nats.credential, name="other")
    begun = asyncio.Event()

    async def hang(_: bytes) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    await other.answer("test", lambda _, data: hang(data))
    request = asyncio.create_task(bus.request("test", b"", timeout_s=3600))
    await begun.wait()
    await nats.kill()
    async with asyncio.timeout(40):
        with pytest.raises(Unavailable, match="the connection broke"):
            await request
    await nats.start()
    await bus.wait_connected()
    with pytest.raises(Unavailable, match="nobody answers"):
        await bus.request("nobody", b"", timeout_s=40)
    await other.close()


async def test_of_several_servers_the_next_one_that_answers_is_taken(tmp_path: Path) -> None:
    one = OpenServer(tmp_path / "one")
    two = OpenServer(tmp_path / "two", keys=one.keys)
    await one.start()
    await two.start()
    await two.stop()
    bus = await Bus.connect(f"{two.url},{one.url}", credential=one.credential, name="test")
    await two.start()
    for left, right in [(one, two), (two, one)]:
        await left.kill()
        await bus.wait_connected()
        other = await Bus.connect(right.url, credential=one.credential, name="other")
        await other.answer("test", lambda _, data: _echo(data))
        assert await bus.request("test", b"x", timeout_s=40) == b"x"
        await other.close()
        await left.start()
    await bus.close()
    await one.stop()
    await two.stop()


async def _echo(data: bytes) -> bytes:
    return data


async def test_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.connection.CONNECT_TIMEOUT_S", 0.5)
    server = OpenServer(tmp_path)
    await server.start()
    await server.stop()
    with pytest.raises(Unavailable, match="no NATS server at"):
        await Bus.connect(server.url, credential=server.credential, name="test")


async def test_a_server_that_starts_late(tmp_path: Path) -> None:
    server = OpenServer(tmp_path)
    await server.start()
    await server.stop()
    connecting = asyncio.create_task(Bus.connect(server.url, credential=server.credential, name="test"))
    await server.start()
    bus = await connecting
    assert bus.connected
    await bus.close()
    await server.stop()


async def test_closing_while_reconnecting_leaves_nothing_running(
    nats: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shared.bus.connection.RECONNECT_WAIT_S", 0.001
    )  # so that closing meets every point of an attempt
    buses = [await Bus.connect(nats.url, credential=nats.credential, name=f"test-{index}") for index in range(60)]
    await nats.stop()
    for index, bus in enumerate(buses):
        for _ in range(index % 20):
            await asyncio.sleep(0)
        async with asyncio.timeout(40):
            await bus.close()
        assert bus.closed
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_when_another_that_waited_for_it_was_cancelled(nats: OpenServer) -> None:
    """A cancelled task cancels the future that it awaits, for all tasks: here the end of the connection."""
    bus = await Bus.connect(nats.url, credential=nats.credential, name="test")
    transport = bus._client._transport
    assert transport is not None
    waiting = asyncio.create_task(transport.wait_closed())  # type: ignore[no-untyped-call]
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    async with asyncio.timeout(40):
        await bus.close()
    assert bus.closed
    await asyncio.wait_for(bus.wait_closed(), 10)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_with_messages_for_a_lost_connection(nats: OpenServer) -> None:
    bus = await Bus.connect(nats.url, credential=nats.credential, name="test")
    await nats.stop()
    await until(lambda: not bus.connected)
    await bus.send("test", b"kept until the connection is back, which it never is")
    async with asyncio.timeout(40):
        await bus.close()
    assert bus.closed
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing(bus: Bus, nats: OpenServer, caplog: pytest.LogCaptureFixture) -> None:
    """Published messages are sent, requests being served are cancelled, and no warning is logged."""
    caplog.set_level(logging.WARNING)
    other = await Bus.connect(nats.url, credential=nats.credential, name="other")
    begun, cancelled, got = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hang(_: bytes) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    async def handle(_: str, data: bytes) -> None:
        got.set()

    await other.answer("hang", lambda _, data: hang(data))
    await bus.listen("last", handle)
    request = asyncio.create_task(bus.request("hang", b"", timeout_s=0.5))
    await begun.wait()
    await other.send("last", b"words")
    await other.close()
    await other.close()
    assert cancelled.is_set()
    assert other.closed
    with pytest.raises(Unavailable):
        await request
    async with asyncio.timeout(40):
        await got.wait()
    assert caplog.text == ""


@pytest.mark.parametrize(
    "sent",
    [
        b"HPUB unicron.heartbeats.n0 16 16\r\nNATS/1.0 \xff\xff\xff\r\n\r\n\r\n",
        b"HPUB unicron.heartbeats.n0 14 14\r\nNATS/1.0  \r\n\r\n\r\n",
        b"HPUB unicron.heartbeats.n0 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        b"HPUB unicron.heartbeats.n0 18 18\r\nNATS/1.0\r\n\xff: \xfe\r\n\r\n\r\n",
        b"PUB unicron.heartbeats.\xff 1\r\nx\r\n",
        b"PUB unicron.heartbeats.n0 reply.\xff 1\r\nx\r\n",
    ],
    ids=["status", "no-status", "no-headers", "header", "subject", "reply"],
)
async def test_a_message_whose_subject_or_headers_are_no_text_leaves_the_client_listening(
    nats: OpenServer, bus: Bus, sent: bytes
) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(_: str, data: bytes) -> None:
        await heard.put(data)

    await bus.listen("unicron.heartbeats.*", hear)
    host, port = nats.url.removeprefix("nats://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    info = json.loads((await reader.readline()).removeprefix(b"INFO "))
    keys = nkeys.from_seed(bytearray(nats.credential.seed.encode()))
    signature = base64.b64encode(keys.sign(info["nonce"].encode())).decode()
    signed = {"nkey": nats.credential.public_key, "sig": signature}
    greeting = json.dumps({"verbose": False, "headers": True, **signed}).encode()
    writer.write(b"CONNECT " + greeting + b"\r\n" + sent + b"PUB unicron.heartbeats.n0 3\r\nend\r\nPING\r\n")
    try:
        async with asyncio.timeout(40):
            answers = b""
            while b"PONG" not in answers:
                answers += await reader.readline()
            assert b"-ERR" not in answers
            while await heard.get() != b"end":
                pass
    finally:
        writer.close()
        await writer.wait_closed()


async def test_the_bus_knows_both_ends_of_its_connection(bus: Bus) -> None:
    assert bus.addresses == ("127.0.0.1", "127.0.0.1")


async def test_a_request_that_nobody_receives_differs_from_one_without_an_answer(bus: Bus) -> None:
    async def never(_: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    await bus.answer("silent", lambda _, data: never(data))
    with pytest.raises(NoReceiver):
        await bus.request("nobody", b"", timeout_s=40)
    with pytest.raises(Unavailable) as caught:
        await bus.request("silent", b"", timeout_s=0.1)
    assert not isinstance(caught.value, NoReceiver)


async def test_a_flush_that_nobody_waits_for_any_more_leaves_the_client_hearing(bus: Bus) -> None:
    """As where a command is superseded while the bus comes back."""

    async def echo(_: str, data: bytes) -> bytes:
        return data

    await bus.answer("test", echo)
    for turns in range(10):
        flushing = asyncio.create_task(bus.wait_connected())
        for _ in range(turns):
            await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.wait({flushing})
        assert await bus.request("test", b"heard", timeout_s=2.0) == b"heard"
