"""The Unix socket on which the node's rank processes talk to the agent (``unicron.protocol.messages``).

The agent (``agent.py``) sends messages to ranks here and receives theirs through a callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from services.agent.files.rank_users import RankUsers
from services.agent.node.process import Process
from services.agent.node.slots import Node
from services.agent.versions import agreed
from shared.bus.cancellation import cancelled
from shared.bus.dropped import DroppedMessages
from shared.bus.messages import problems_of
from shared.errors import Unavailable, Undecodable
from shared.service.changes import Changes
from unicron.protocol import messages

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
"""A connection is dropped after this time if it sends no hello, or comes from a process that the node did not fork."""

UNREAD_S = 0.05
"""How long the agent waits for the unread lines of a dead process. A connection that was made is attached within a few
turns of the event loop, and the end of file comes at once, unless a child of the process still has the socket open."""

MOST_OF_ONE_PROCESS = 4
"""Connections of one process at a time. A rank has one, and for a moment a second one after it has lost the first."""

SOURCE = "the socket of the ranks"
"""Source of a line whose sender is no rank of the node."""

_RECEIVED = messages.encode(messages.Received())
"""The answer to a message of a rank that is part of the node's record (``record.py``)."""

_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid (unix(7))."""


class RankServer:
    """Listens for ranks and passes their messages on.

    The kernel identifies a connecting process and its user (SO_PEERCRED). A process that the node forked, with the user
    of its task, may connect.

    Args:
        listener: the socket on which ranks connect. Its owner keeps it open.
        node: lists the forked processes.
        changes: notified whenever ``node`` changes.
        received: called for each message after ``Hello``.
        dropped: counts the messages that cannot be decoded.
        users: of the tasks.
    """

    def __init__(
        self,
        listener: socket.socket,
        node: Node,
        changes: Changes,
        received: Callable[[Process, messages.Message], None],
        dropped: DroppedMessages,
        users: RankUsers,
    ) -> None:
        self._dropped, self._users = dropped, users
        self._listener, self._node, self._changes, self._received = listener, node, changes, received
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._closed: dict[str, asyncio.Event] = {}
        self._early: dict[str, list[messages.Message]] = {}
        """Process id -> messages to a process that has yet to attach."""
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._connections: Counter[int] = Counter()
        """Pid -> its connections."""

    async def start(self) -> None:
        """Begin to listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _LastWords(self._serve), sock=self._listener.dup())

    async def stop(self) -> None:
        """Close the socket and every connection."""
        if self._server is not None:
            self._server.close()
        await cancelled(*self._handlers)

    def send(self, process: Process, message: messages.Message) -> None:
        """Send a message, at once or when the process attaches.

        A message to a process that has ended is lost; the fork server reports that end.
        """
        writer = self._writers.get(process.id)
        if writer is None and not process.attached:
            self._early.setdefault(process.id, []).append(message)
        elif writer is not None and not writer.is_closing():
            writer.write(messages.encode(message))

    async def read_rest(self, process: Process) -> None:
        """Wait until the unread messages of a dead process have been received, for ``UNREAD_S`` at most.

        The end of a process that reports an error as soon as it starts may be known here before its connection is.
        """
        try:
            async with asyncio.timeout(UNREAD_S):
                await self._changes.until(lambda: process.attached)
                if (closed := self._closed.get(process.id)) is not None:
                    await closed.wait()
        except TimeoutError:
            if process.attached:
                logger.warning("%s: its socket is still open after its end", process.worker)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        pid, uid = _peer(writer)
        self._connections[pid] += 1
        try:
            if uid != os.geteuid() and not self._users.includes(uid):
                raise messages.ProtocolError(f"process {pid} belongs to user {uid}")
            if self._connections[pid] > MOST_OF_ONE_PROCESS:
                raise messages.ProtocolError(f"process {pid} has {MOST_OF_ONE_PROCESS} connections already")
            await self._connection(reader, writer, pid, uid)
        except (messages.ProtocolError, ConnectionError, TimeoutError) as err:
            process = self._node.by_pid(pid)
            text = f"its connection was closed: {type(err).__name__}: {err}"
            self._dropped.note(process.worker if process else SOURCE, Undecodable(text, kind=type(err).__name__))
        except asyncio.CancelledError:
            pass  # the agent stops; asyncio would log a cancelled handler as an error
        finally:
            self._handlers.discard(task)
            self._connections -= Counter((pid,))  # the difference keeps no count of zero
            writer.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int, uid: int) -> None:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            hello = messages.decode(await _line(reader))
            # A child may connect before the agent has read the fork server's answer with its pid.
            await self._changes.until(lambda: self._node.by_pid(pid) is not None)
        process = self._node.by_pid(pid)
        if process is None:
            raise messages.ProtocolError(f"process {pid} has ended")
        if uid != self._users.owner(process.task):
            raise messages.ProtocolError(f"process {pid} of {process.task} belongs to user {uid}")
        try:
            _check(hello, process)
        except _WrongVersion as err:
            writer.write(messages.encode(messages.Incompatible(reason=str(err))))
            raise
        closed = self._closed[process.id] = asyncio.Event()
        self._writers[process.id] = writer
        process.attached = True
        for message in self._early.pop(process.id, ()):
            writer.write(messages.encode(message))
        self._changes.notify()
        try:
            while line := await _line(reader):
                if self._take(process, line) != messages.Progress.name:
                    writer.write(_RECEIVED)
        finally:
            closed.set()
            # A process that lost its connection may have opened a new one by now.
            if self._writers.get(process.id) is writer:
                del self._writers[process.id], self._closed[process.id]

    def _take(self, process: Process, line: bytes) -> str:
        """Pass a message on; return its name.

        A message that cannot be used is dropped, and is not to be repeated either.
        """
        name = ""
        try:
            message = messages.decode(line)
            name = message.name
            self._received(process, message)
        except messages.ProtocolError as err:
            name = err.name
            self._dropped.note(process.worker, Undecodable(str(err), kind=name))
        except ValidationError as err:  # what a signal may not say: a path with a null byte
            self._dropped.note(process.worker, Undecodable(problems_of(err), kind=name))
        return name


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, empty at the end. Of a line that is too long only its end is returned: no message."""
    too_long = False
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as err:
            line = err.partial
        except asyncio.LimitOverrunError as err:
            await reader.readexactly(err.consumed)
            too_long = True
            continue
        return b"\n" if too_long else line


class _LastWords(asyncio.StreamReaderProtocol):
    """Reads to the end what a process has sent, also where a write to the process has broken the connection.

    asyncio closes a connection at the first write that fails, which is one to a process that has ended, and drops what
    the process sent before: its last error, for instance.
    """

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._words = asyncio.StreamReader(limit=messages.MAX_LINE_BYTES)
        self._connection: socket.socket | None = None
        super().__init__(self._words, serve)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection = transport.get_extra_info("socket")
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ConnectionError) and self._connection is not None:
            with contextlib.suppress(OSError):
                while data := os.read(self._connection.fileno(), messages.MAX_LINE_BYTES):
                    self._words.feed_data(data)
            exc = None  # an end of file for the reader, once it has read the rest
        super().connection_lost(exc)


class _WrongVersion(messages.ProtocolError):
    """A process with which the agent has no version of the protocol in common."""


def _check(hello: messages.Message, process: Process) -> None:
    """Refuse a process that does not begin with the right ``Hello``.

    Raises:
        ProtocolError: another message, no version in common (``_WrongVersion``), or another task or worker
            than the process was forked for.
    """
    if not isinstance(hello, messages.Hello):
        raise messages.ProtocolError(f"{process.worker}: the first line is {hello.name}, not hello")
    try:
        agreed(process.worker, hello.version, hello.newest, hello.library)
    except Unavailable as err:
        raise _WrongVersion(err.detail) from err
    if (hello.task, hello.worker) != (process.task, process.worker):
        raise messages.ProtocolError(f"{process.worker} of {process.task} claims to be {hello.worker} of {hello.task}")


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Return pid and user id of the process at the other end."""
    connection: socket.socket = writer.get_extra_info("socket")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
