"""The agent's self-test: whether the node can run ranks, asked before it is used again (``shared/self_test.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.agent.fork_server import ForkServer
from services.agent.node import Node
from services.agent.stores import ID_PREFIX
from shared.dropped import DroppedMessages
from shared.errors import Unavailable, Undecodable
from shared.messages import REASON_CHARACTERS, decode
from shared.self_test import SELF_TEST, SELF_TEST_REQUEST, SelfTest, SelfTestResult

logger = logging.getLogger(__name__)

PROCESS_TIMEOUT_S = 5.0
"""Time for a process that the fork server starts: it takes 50 ms, on a busy machine a second."""


class SelfTests:
    """Tests the node on request.

    Args:
        node: whose workers may have processes.
        ip: an address of the node, on which a process of the test listens.
        folders: where ranks write; each must take a file.
        server: returns the fork server, once one runs.
        dropped: counts requests that cannot be read.
        devices: returns which device cannot be used; empty: all can.
    """

    def __init__(
        self,
        node: Node,
        ip: str,
        folders: list[Path],
        server: Callable[[], Awaitable[ForkServer]],
        dropped: DroppedMessages,
        devices: Callable[[], Awaitable[str]],
    ) -> None:
        self._devices = devices
        self._node, self._ip, self._folders, self._server, self._dropped = node, ip, folders, server, dropped

    async def serve(self, data: bytes) -> bytes:
        """Answer a request."""
        try:
            problem = await self._problem(decode(SELF_TEST_REQUEST, data))
        except Undecodable as err:
            self._dropped.note(SELF_TEST, err)
            problem = f"the request cannot be read: {err.detail}"
        else:
            if problem:
                logger.warning("self-test failed: %s", problem)
        result = SelfTestResult(incarnation=self._node.incarnation, problem=problem[:REASON_CHARACTERS])
        return result.model_dump_json().encode()

    async def _problem(self, request: SelfTest) -> str:
        """Return what is wrong with the node; empty if nothing is."""
        processes = list(self._node.processes())
        if request.empty and processes:
            return f"{processes[0].worker} still has a process of task {processes[0].task} (pid {processes[0].pid})"
        if problem := await self._devices():
            return problem
        for folder in self._folders:
            if problem := await asyncio.to_thread(_write_problem, folder):
                return problem
        try:
            async with asyncio.timeout(PROCESS_TIMEOUT_S):
                await self._start_process()
        except TimeoutError:
            return f"the fork server has not started a process within {PROCESS_TIMEOUT_S:g} s"
        except Unavailable as err:
            return f"the fork server starts no process: {err.detail}"
        except OSError as err:
            return f"a process on this node cannot be reached at {self._ip}: {err}"
        return ""

    async def _start_process(self) -> None:
        """Start a process that listens on the node's address, connect to it, and end it."""
        server = await self._server()
        output = self._folders[0] / "self-test.log"
        forked, port = await server.store(f"{ID_PREFIX}self-test-{uuid.uuid4().hex}", host=self._ip, output=output)
        try:
            _, writer = await asyncio.open_connection(self._ip, port)
            writer.close()
        finally:
            forked.kill()
            forked.close()


def _write_problem(folder: Path) -> str:
    """Return why the folder takes no file; empty if it does."""
    path = folder / f".self-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
    except OSError as err:
        with contextlib.suppress(OSError):
            path.unlink()
        return f"{folder} cannot be written to: {err.strerror or err}"
    return ""
