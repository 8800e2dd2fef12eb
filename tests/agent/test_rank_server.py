"""The socket on which ranks talk to their agent."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from services.agent import inheritance
from services.agent.node import Node
from services.agent.process import Process
from services.agent.rank_server import RankServer
from services.agent.rank_users import RankUsers
from shared.changes import Changes
from shared.dropped import DroppedMessages
from unicron.protocol import VERSION, Hello, Hold, Message, Progress, Raised, encode

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
        async with asyncio.timeout(30):
            await changes.until(lambda: process.attached)
        steps = [Progress(generation=1, rank=0, step=step, phase="begun") for step in range(100)]
        raised = Raised(generation=1, rank=0, step=100, kind="exception", error="E", detail="", traceback="")
        rank.sendall(b"".join(encode(message) for message in (*steps, raised)))
        rank.close()
        server.send(process, Hold(generation=1))  # the connection is broken before the agent has read from it
        await server.read_rest(process)
        async with asyncio.timeout(30):
            while raised not in heard:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert heard == [*steps, raised]
    finally:
        rank.close()
        await server.stop()
        listener.close()
