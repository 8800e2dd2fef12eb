"""Lets the test reach a TCP port of a machine: ``relay.py PATH HOST PORT`` relays a Unix socket to it.

Unix sockets with a path know no network namespaces, so the test needs no address in the machines' network.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio import StreamReader, StreamWriter

CHUNK_BYTES = 1 << 16


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def relay(path: str, host: str, port: int) -> None:
    """Relay until cancelled."""

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))

    server = await asyncio.start_unix_server(connected, path)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(relay(sys.argv[1], sys.argv[2], int(sys.argv[3])))
