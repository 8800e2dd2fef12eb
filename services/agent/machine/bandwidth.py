"""The bandwidth between two nodes, measured over the connections on which agents answer probes (``probe.py``).

After its line, an agent takes one more line on the connection: ``bandwidth send``, and it sends ``MOST_BYTES``; or
``bandwidth take``, and it takes what comes and says how much that was in how long (``took BYTES SECONDS``). Both end
after ``TRANSFER_S``. An agent of an older version closes the connection instead. An agent serves one transfer at a
time, so that many cannot slow a node down; ranks hardly notice one transfer of 16 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping

from shared.bus.cancellation import cancelled
from shared.messages import probes
from shared.messages.probes import ProbeTarget

MOST_BYTES = 16 << 20
"""Longest transfer in one direction: at 100 Gbit/s a millisecond, and more than what fits into the sockets' buffers."""

TRANSFER_S = 2.0
"""Longest time for one direction; what has arrived by then gives the rate."""

REQUEST_S = 2.0
"""How long an agent waits for a request after its line. An agent that only probes closes the connection at once."""

CHUNK_BYTES = 256 << 10
"""Bytes that are written or read at once: the agent's other work goes on between two of them."""

SEND, TAKE = b"bandwidth send\n", b"bandwidth take\n"

_TOOK = b"took "


class BandwidthServer:
    """Answers requests for a transfer, one at a time."""

    def __init__(self) -> None:
        self._busy = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve what a peer asks after the line of a probe, if it asks for anything."""
        with contextlib.suppress(TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_S):
                asked = await reader.readuntil(b"\n")
            if self._busy or asked not in (SEND, TAKE):
                return
            self._busy = True
            try:
                async with asyncio.timeout(2 * TRANSFER_S):
                    if asked == SEND:
                        await _send(writer)
                    else:
                        taken, seconds = await _receive(reader)
                        writer.write(_TOOK + f"{taken} {seconds:.6f}\n".encode())
                        await writer.drain()
            finally:
                self._busy = False


async def measure(peers: Mapping[str, ProbeTarget]) -> dict[str, float]:
    """Return node -> the lower of the rates to and from it, in bytes per second, one peer after the other.

    A peer that is not reached has the rate 0. A peer whose agent is of an older version or busy is left out.
    """
    rates: dict[str, float] = {}
    for name, target in peers.items():
        try:
            rates[name] = min(await _rate(name, target, SEND), await _rate(name, target, TAKE))
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError, ValueError):
            continue
        except (OSError, TimeoutError):
            rates[name] = 0.0
    return rates


def typical(rates: Mapping[str, float]) -> float:
    """Return the rate that stands for all: the middle one, or of two the better, which no fault of its peer lowers."""
    return statistics.median_high(rates.values())


async def _rate(name: str, target: ProbeTarget, what: bytes) -> float:
    """Return the rate of one direction, in bytes per second."""
    host, _, port = target.address.rpartition(":")
    async with asyncio.timeout(REQUEST_S):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=CHUNK_BYTES)
    sending: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(REQUEST_S):
            if await reader.readuntil(b"\n") != probes.line(name, target.incarnation):
                raise ValueError("another agent")
        writer.write(what)
        if what == SEND:
            taken, seconds = await _receive(reader)
        else:
            sending = asyncio.create_task(_send(writer))
            async with asyncio.timeout(2 * TRANSFER_S):
                answer = (await reader.readuntil(b"\n")).removeprefix(_TOOK).split()
            taken, seconds = int(answer[0]), float(answer[1])
        return taken / max(seconds, 1e-9)
    finally:
        if sending is not None:
            await cancelled(sending)
        writer.close()


async def _send(writer: asyncio.StreamWriter) -> None:
    chunk = bytes(CHUNK_BYTES)
    for _ in range(MOST_BYTES // CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> tuple[int, float]:
    """Take bytes until all have come or the time is up; return how many came, and in how many seconds.

    Raises:
        asyncio.IncompleteReadError: the peer has closed the connection before the first one.
    """
    taken, began = 0, time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TRANSFER_S):
            while taken < MOST_BYTES:
                data = await reader.read(min(CHUNK_BYTES, MOST_BYTES - taken))
                if not data:
                    break
                taken += len(data)
    if taken == 0 and time.monotonic() - began < TRANSFER_S:
        raise asyncio.IncompleteReadError(b"", MOST_BYTES)
    return taken, time.monotonic() - began
