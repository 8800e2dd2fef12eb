"""A node's connection to NATS that costs next to nothing: the lines of NATS's protocol, and no client behind them.

Thousands of clients of nats-py, each with its tasks, would take more of a machine than all services that they are to
load. A ``Wire`` is a ``Bus`` to whoever uses it: it authenticates, pings and reconnects as often as an agent's bus.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import nkeys

from shared.bus.connection import RECONNECT_WAIT_S, Bus
from shared.bus.credentials import Credential
from shared.bus.identities import inbox_prefix
from shared.bus.nats_client import NatsClient
from shared.errors import Unavailable

Handle = Callable[[str, bytes], Awaitable[bytes | object]]

CONNECTING = 64
"""Most connections that are being made at a time."""

_REPLIES = 1
"""Number of the subscription to the replies to this node's requests; those of its endpoints follow."""


class Wire(Bus):
    """The connection of one node, made by ``open``."""

    def __init__(self, url: str, credential: Credential, name: str, turn: asyncio.Semaphore) -> None:
        super().__init__(NatsClient(), name, inbox_prefix(credential.identity))
        place = urlsplit(url)
        self._host, self._port = place.hostname or "", place.port or 0
        self._keys, self._turn = nkeys.from_seed(bytearray(credential.seed.encode())), turn
        self._handlers: dict[int, tuple[str, Handle]] = {}
        self._replies: dict[str, asyncio.Future[bytes]] = {}
        self._asked = 0
        self._lines: _Lines | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._ended = False

    async def open(self) -> None:
        """Connect; try again until there is a server."""
        while not self._ended:
            try:
                async with self._turn:
                    _, lines = await asyncio.get_running_loop().create_connection(
                        lambda: _Lines(self), self._host, self._port
                    )
                    async with asyncio.timeout(10.0):
                        await lines.ready
                self._lines = lines
                return
            except (OSError, TimeoutError):
                await asyncio.sleep(RECONNECT_WAIT_S * random.uniform(0.5, 1.5))

    def greeting(self, nonce: str) -> bytes:
        """Return what a client says first: who it is, and what it subscribes to."""
        signature = base64.urlsafe_b64encode(self._keys.sign(nonce.encode())).rstrip(b"=").decode()
        about = {
            "verbose": False,
            "pedantic": False,
            "protocol": 1,
            "lang": "python3",
            "version": "2",
            "name": self._name,
        }
        about |= {"nkey": self._keys.public_key.decode(), "sig": signature}
        subjects = {
            _REPLIES: f"{self.prefix}.*",
            **{number: subject for number, (subject, _) in self._handlers.items()},
        }
        subscriptions = "".join(f"SUB {subject} {number}\r\n" for number, subject in subjects.items())
        return f"CONNECT {json.dumps(about)}\r\n{subscriptions}PING\r\n".encode()

    def lost(self, lines: _Lines) -> None:
        """Connect again, unless this end has closed the connection."""
        if self._lines is lines and not self._ended:
            self._lines = None
            self._run(self.open())

    def came(self, number: int, subject: str, reply: str, data: bytes) -> None:
        """Take a message: a reply, or a request to one of the endpoints."""
        if number == _REPLIES:
            asked = self._replies.get(subject)
            if asked is not None and not asked.done():
                asked.set_result(data)
            return
        self._run(self._handle(self._handlers[number][1], subject, reply, data))

    async def _handle(self, handle: Handle, subject: str, reply: str, data: bytes) -> None:
        answer = await handle(subject, data)
        if reply and isinstance(answer, bytes):
            await self.send(reply, answer)

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def ping(self) -> None:
        """Send a ping, as a client of nats-py does every ``PING_INTERVAL_S``."""
        if self._lines is not None:
            self._lines.write(b"PING\r\n")

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None, *, reply: str = "") -> None:
        """Send bytes; what is sent without a connection is lost."""
        if self._lines is None:
            raise Unavailable("no connection to NATS")
        self._lines.write(b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply.encode(), len(data), data))

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send bytes and return the reply.

        Raises:
            Unavailable: there is no reply in time, or no connection.
        """
        self._asked += 1
        inbox = f"{self.prefix}.{self._asked}"
        asked = self._replies[inbox] = asyncio.get_running_loop().create_future()
        try:
            await self.send(subject, data, reply=inbox)
            async with asyncio.timeout(timeout_s):
                answer: bytes = await asked
                return answer
        except TimeoutError as err:
            raise Unavailable(f"no answer on {subject} within {timeout_s} s") from err
        finally:
            del self._replies[inbox]

    async def listen(self, subject: str, handle: Callable[[str, bytes], Awaitable[object]]) -> None:
        """Call ``handle`` for each message, each in a task of its own."""
        number = _REPLIES + 1 + len(self._handlers)
        self._handlers[number] = (subject, handle)
        if self._lines is not None:
            self._lines.write(f"SUB {subject} {number}\r\n".encode())

    async def answer(self, subject: str, handle: Callable[[str, bytes], Awaitable[bytes]], group: str = "") -> None:
        """Reply to requests with the return value of ``handle``."""
        await self.listen(subject, handle)

    async def close(self) -> None:
        """Break the connection."""
        self._ended = True
        if self._lines is not None:
            self._lines.end()


class _Lines(asyncio.Protocol):
    """One connection: what comes in is taken apart, line by line. ``ready``: done once the server has answered."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._buffer = wire, b""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(exc or ConnectionResetError("closed"))
        self._wire.lost(self)

    def write(self, data: bytes) -> None:
        """Write some lines."""
        self._transport.write(data)

    def end(self) -> None:
        """Break the connection."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        buffer, at = self._buffer + data, 0
        while (end := buffer.find(b"\r\n", at)) >= 0:
            line = buffer[at:end]
            if line.startswith(b"MSG "):
                _, subject, number, *reply, size = line.decode().split(" ")
                body = end + 2
                if len(buffer) < body + int(size) + 2:
                    break
                self._wire.came(int(number), subject, reply[0] if reply else "", buffer[body : body + int(size)])
                end = body + int(size)
            elif line.startswith(b"INFO "):
                if "nonce" in (info := json.loads(line[5:])) and not self.ready.done():
                    self.write(self._wire.greeting(info["nonce"]))
            elif line == b"PING":
                self.write(b"PONG\r\n")
            elif line == b"PONG" and not self.ready.done():
                self.ready.set_result(None)
            elif line.startswith(b"-ERR") and not self.ready.done():
                self.ready.set_exception(ConnectionRefusedError(line.decode()))
            at = end + 2
        self._buffer = buffer[at:]
