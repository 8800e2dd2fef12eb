"""A proxy before a PostgreSQL server that cuts a connection in the middle of a COMMIT."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

SOCKET = ".s.PGSQL.5432"

_COMMIT = b"COMMIT"


class Cutter:
    """Forwards connections on a Unix socket in ``folder`` to the server's; an async context manager.

    ``cut``: what happens to the connection with the next COMMIT: ``before``: the server does not get it. ``after``: the
    server does it, and its answer is lost. The connections after that one are forwarded.
    """

    def __init__(self, server: Path, folder: Path) -> None:
        self._server = server / SOCKET
        self._socket = folder / SOCKET
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        self.cut: Literal["", "before", "after"] = ""
        self.cuts = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_unix_server(self._forward, self._socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server_in, server_out = await asyncio.open_unix_connection(self._server)
        answers = asyncio.create_task(_copy(server_in, client_out))
        try:
            with contextlib.suppress(ConnectionError):
                while data := await client_in.read(1 << 16):
                    if self.cut and _COMMIT in data:
                        how, self.cut = self.cut, ""
                        self.cuts += 1
                        answers.cancel()
                        if how == "after":
                            server_out.write(data)
                            await server_in.read(1 << 16)
                        return
                    server_out.write(data)
                    await server_out.drain()
        finally:
            answers.cancel()
            client_out.transport.abort()
            server_out.transport.abort()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()
