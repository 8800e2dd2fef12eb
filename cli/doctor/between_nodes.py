"""Measuring between two nodes: ``unicron doctor --listen`` on one, ``unicron doctor --peer`` on the other.

Each connection carries one request, a line of one word: ``hello`` is answered with time, node and versions; behind
``take`` come bytes, whose number and rate are answered; ``give`` is answered with bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from cli.doctor.measured import Peer
from shared.errors import InvalidInput

TRANSFER_S = 1.0
"""How long bytes are sent in each direction: TCP is at its full rate within a few tens of round trips."""

LIMIT_S = 10.0
"""Time for a request. A transfer over a link of 1 MB/s, with what buffers have, is done in less."""

HELLOS = 5
"""Times that a peer is asked for its time: the answer with the shortest round trip counts."""

BLOCK = bytes(1 << 18)
"""Bytes that are sent at once: enough that system calls are rare."""

LINE_BYTES = 4096
"""Longest line: the versions of a handful of packages."""


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        InvalidInput: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise InvalidInput(f"{text!r} is no address of a peer; allowed: HOST:PORT, with a port up to 65535")
    return host.strip("[]"), int(port)


class Listener:
    """Answers other nodes until it is closed.

    Args:
        node: name of this node.
        versions: of this node.
    """

    def __init__(self, node: str, versions: dict[str, str]) -> None:
        self._about = {"node": node, "versions": versions}
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises:
            OSError: the address is none of this machine, or the port is in use.
        """
        self._server = await asyncio.start_server(self._answer, host, port, limit=LINE_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop to listen."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(LIMIT_S):
                match await reader.readuntil(b"\n"):
                    case b"hello\n":
                        _send_line(writer, {**self._about, "at": time.time()})
                    case b"take\n":
                        _send_line(writer, {"bytes_per_s": await _receive(reader)})
                    case b"give\n":
                        await _send(writer)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()


async def measure(peer: str) -> Peer:
    """Measure the way to a peer, ``HOST:PORT``.

    Raises:
        InvalidInput: that is no address.
    """
    host, port = address_of(peer)
    try:
        async with asyncio.timeout(4 * LIMIT_S):
            about, round_trip_s, offset_s = min(
                [await _hello(host, port) for _ in range(HELLOS)], key=lambda hello: hello[1]
            )
            return Peer(
                peer=peer,
                node=about["node"],
                versions=about["versions"],
                round_trip_s=round_trip_s,
                offset_s=offset_s,
                sent_bytes_per_s=await _sent(host, port),
                received_bytes_per_s=await _received(host, port),
            )
    except TimeoutError:
        return Peer(peer=peer, problem=f"{peer} does not answer in time")
    except OSError as err:
        return Peer(peer=peer, problem=f"{peer} is not reached: {err.strerror or err}")
    except (ValueError, KeyError, TypeError, asyncio.IncompleteReadError):
        return Peer(peer=peer, problem=f"what listens at {peer} is no `unicron doctor --listen`")


async def _hello(host: str, port: int) -> tuple[dict[str, Any], float, float]:
    """Return what a peer says, the round trip, and how much its clock is ahead."""
    async with _opened(host, port) as (reader, writer):
        asked_at, asked_s = time.time(), time.perf_counter()
        writer.write(b"hello\n")
        said = json.loads(await _line(reader))
        round_trip_s = time.perf_counter() - asked_s
        return said, round_trip_s, float(said["at"]) - (asked_at + round_trip_s / 2)


async def _sent(host: str, port: int) -> float:
    async with _opened(host, port) as (reader, writer):
        writer.write(b"take\n")
        await _send(writer)
        return float(json.loads(await _line(reader))["bytes_per_s"])


async def _received(host: str, port: int) -> float:
    async with _opened(host, port) as (reader, writer):
        writer.write(b"give\n")
        async with asyncio.timeout(LIMIT_S):
            return await _receive(reader)


@contextlib.asynccontextmanager
async def _opened(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield reader, writer
    finally:
        writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        return await reader.readuntil(b"\n")


async def _send(writer: asyncio.StreamWriter) -> None:
    """Send bytes for a while, and end the connection's one direction."""
    until_s = time.monotonic() + TRANSFER_S
    while time.monotonic() < until_s:
        writer.write(BLOCK)
        await writer.drain()
    writer.write_eof()


async def _receive(reader: asyncio.StreamReader) -> float:
    """Return the rate of the bytes up to the end of the connection's one direction."""
    received, began_s = 0, time.perf_counter()
    while block := await reader.read(len(BLOCK)):
        received += len(block)
    return received / (time.perf_counter() - began_s)


def _send_line(writer: asyncio.StreamWriter, document: dict[str, object]) -> None:
    writer.write(f"{json.dumps(document)}\n".encode())
