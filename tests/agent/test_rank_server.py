"""The socket on which ranks talk to their agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from services.agent.files.rank_users import RankUsers
from services.agent.node.process import Process
from services.agent.node.slots import Node
from services.agent.ranks.rank_server import MOST_OF_ONE_PROCESS, RankServer
from services.agent.succession import inheritance
from shared.bus.dropped import DroppedMessages
from shared.service.changes import Changes
from tests.condition import until
from unicron.protocol.messages import (
    MAX_LINE_BYTES,
    Checkpointed,
    Finished,
    Hello,
    Hold,
    Message,
    Progress,
    Raised,
    Received,
    decode,
    encode,
)
from unicron.protocol.versions import VERSION

pytestmark = pytest.mark.timeout(60)


async def test_what_a_process_sent_before_its_end_is_read_although_a_message_to_it_fails() -> None:
    process = Process(id="a", task="t", worker="n0/0", generation=1, pid=os.getpid())
    node = Node.restored("n0", "first", 1, processes=[process], fences={}, at_s=0.0)
    changes, heard = Changes(), list[Message]()
    listener = inheritance.listener(f"unicron-test-{os.getpid()}-rank-server")
    server = RankServer(
        listener, node, changes, lambda _, message: heard.append(message), DroppedMessages({}), RankUsers("")
    )
    await server.start()
    rank = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        rank.connect(listener.getsockname())
        rank.sendall(encode(Hello(version=VERSION, task="t", worker="n0/0", pid=os.getpid())))
        await until(lambda: process.attached)
        steps = [Progress(generation=1, rank=0, step=step, phase="begun") for step in range(100)]
        raised = Raised(generation=1, rank=0, step=100, kind="exception", error="E", detail="", traceback="")
        rank.sendall(b"".join(encode(message) for message in (*steps, raised)))
        rank.close()
        server.send(process, Hold(generation=1))  # the connection is broken before the agent has read from it
        await server.read_rest(process)
        await until(lambda: raised in heard)
        assert heard == [*steps, raised]
    finally:
        rank.close()
        await server.stop()
        listener.close()


@dataclass
class Scene:
    """A server with one process, which is the test's own."""

    process: Process
    server: RankServer
    changes: Changes
    address: str
    heard: list[Message] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    async def connect(self, *messages: Message) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.address)
        writer.write(b"".join(map(encode, messages)))
        return reader, writer


HELLO = Hello(version=VERSION, task="t", worker="n0/0", pid=os.getpid())


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    process = Process(id="a", task="t", worker="n0/0", generation=1, pid=os.getpid())
    node = Node.restored("n0", "first", 1, processes=[process], fences={}, at_s=0.0)
    listener = inheritance.listener(f"unicron-test-{os.getpid()}-{request.node.name[:40]}")
    changes, heard, counters = Changes(), list[Message](), dict[str, int]()

    def received(process: Process, message: Message) -> None:
        node.receive(process, message, at_s=0.0, now=datetime.now(UTC))
        heard.append(message)

    server = RankServer(listener, node, changes, received, DroppedMessages(counters), RankUsers(""))
    await server.start()
    async with asyncio.timeout(30):
        yield Scene(process, server, changes, listener.getsockname(), heard, counters)
        await server.stop()
    listener.close()


async def test_a_line_that_is_too_long_is_dropped_and_the_next_one_is_read(scene: Scene) -> None:
    reader, writer = await scene.connect(HELLO)
    after = Checkpointed(generation=1, step=1, path="/c")
    for length in (MAX_LINE_BYTES + 1, 3 * MAX_LINE_BYTES):
        writer.write(b"x" * length + b"\n" + encode(after))
        for _ in range(2):  # each of the two lines is answered once
            assert decode(await reader.readline()) == Received()
    assert scene.heard == [after, after]
    assert scene.counters == {"undecodable": 2}
    writer.close()


@pytest.mark.parametrize("path", ["/c\0", "/" + "x" * 5000])
async def test_what_no_signal_can_repeat_is_dropped_and_changes_nothing(scene: Scene, path: str) -> None:
    """It is answered: a rank repeats what was not, to every agent that it finds."""
    reader, writer = await scene.connect(
        HELLO,
        Checkpointed(generation=1, step=1, path=path),
        Finished(generation=1, rank=0, step=9, parameters_path=path),
    )
    for _ in range(2):
        assert decode(await reader.readline()) == Received()
    assert not scene.process.finished
    writer.write(encode(Finished(generation=1, rank=0, step=9, parameters_path="/p")))
    assert decode(await reader.readline()) == Received()
    assert [message.name for message in scene.heard] == ["finished"]
    assert scene.process.finished
    assert scene.counters == {"undecodable": 2}
    writer.close()


async def test_connections_that_are_no_rank_s_are_counted_and_logged_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for line in (b"\n", b"[" * 100_000 + b"\n", b"x" * (MAX_LINE_BYTES + 9) + b"\n", b"\xff" * 9):
        reader, writer = await scene.connect()
        writer.write(line)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    assert scene.counters == {"undecodable": 4}
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert not scene.process.attached


async def test_one_process_has_a_few_connections_only(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    opened = [await scene.connect() for _ in range(MOST_OF_ONE_PROCESS)]
    reader, further = await scene.connect()
    assert await reader.read() == b""
    assert "has 4 connections already" in caplog.text
    for _, writer in [*opened, (reader, further)]:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    reader, writer = await scene.connect(HELLO, Checkpointed(generation=1, step=1, path="/c"))
    while not scene.heard:  # the server may not have seen the end of the others yet
        if await reader.read(1) == b"":
            reader, writer = await scene.connect(HELLO, Checkpointed(generation=1, step=1, path="/c"))
    writer.close()
