"""The Unix socket on which the node's rank processes talk to the agent (``unicron.protocol``)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from services.detector.changes import Changes
from services.detector.node import Node, Process
from unicron import protocol

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
"""A connection that says no hello, or comes from a process nobody forked, is dropped after this."""

LAST_WORDS_S = 0.05
"""After a process's death its unread lines are read first; the end of file follows unless a child of its own still
holds the socket, which is not waited for longer."""

_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid (unix(7))."""


def socket_name(run_dir: Path, node: str, incarnation: str) -> str:
    """Return the name in Linux's abstract namespace: no file, and no limit from a long run directory."""
    digest = hashlib.sha256(f"{run_dir.resolve()}\0{node}\0{incarnation}".encode()).hexdigest()
    return f"unicron-{digest[:32]}"


class RankServer:
    """Listens for ranks and passes on what they say.

    A process is known by the kernel's word for its pid (SO_PEERCRED), not by its own; only our own user may connect.

    Args:
        name: abstract socket name.
        node: where the forked processes are listed.
        changes: notified whenever ``node`` changes.
        heard: called for each message after ``Hello``.
    """

    def __init__(
        self, name: str, node: Node, changes: Changes, heard: Callable[[Process, protocol.Message], None]
    ) -> None:
        self._name, self._node, self._changes, self._heard = name, node, changes, heard
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._closed: dict[str, asyncio.Event] = {}
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(
            self._serve, path=f"\0{self._name}", limit=protocol.MAX_LINE_BYTES
        )

    async def stop(self) -> None:
        """Close the socket and every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._handlers:
            task.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def send(self, process: Process, message: protocol.Message) -> None:
        """Send a message; one to a process that is gone is lost (its end is reported elsewhere)."""
        writer = self._writers.get(process.id)
        if writer is not None and not writer.is_closing():
            writer.write(protocol.encode(message))

    async def last_words(self, process: Process) -> None:
        """Wait until what a dead process still said has been heard."""
        closed = self._closed.get(process.id)
        if closed is None:
            return
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await closed.wait()
        except TimeoutError:
            logger.warning("%s: its socket outlives it", process.worker)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            await self._connection(reader, writer)
        except (protocol.ProtocolError, ConnectionError, TimeoutError, ValueError) as err:
            logger.warning("rank connection dropped: %s: %s", type(err).__name__, err)
        except asyncio.CancelledError:
            pass  # the agent stops; asyncio would report a cancelled handler as an error
        finally:
            self._handlers.discard(task)
            writer.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, uid = _peer(writer)
        if uid != os.geteuid():
            raise protocol.ProtocolError(f"process {pid} belongs to user {uid}")
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            hello = protocol.decode(await reader.readline())
            # The child may connect before the fork server's word of its birth has been read.
            await self._changes.until(lambda: self._node.by_pid(pid) is not None)
        process = self._node.by_pid(pid)
        if process is None:
            raise protocol.ProtocolError(f"process {pid} has ended")
        _check(hello, process)
        closed = self._closed[process.id] = asyncio.Event()
        self._writers[process.id] = writer
        process.attached = True
        self._changes.notify()
        try:
            while line := await reader.readline():
                self._heard(process, protocol.decode(line))
        finally:
            closed.set()
            # A process that lost its connection may have a new one by now.
            if self._writers.get(process.id) is writer:
                del self._writers[process.id], self._closed[process.id]


def _check(hello: protocol.Message, process: Process) -> None:
    if not isinstance(hello, protocol.Hello):
        raise protocol.ProtocolError(f"{process.worker}: the first line is {hello.name}, not hello")
    if hello.version != protocol.VERSION:
        raise protocol.ProtocolError(f"{process.worker} speaks version {hello.version}, not {protocol.VERSION}")
    if (hello.task, hello.worker) != (process.task, process.worker):
        raise protocol.ProtocolError(f"{process.worker} says it is {hello.worker} of {hello.task}")


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    connection: socket.socket = writer.get_extra_info("socket")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
