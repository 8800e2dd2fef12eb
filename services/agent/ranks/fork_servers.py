"""The node's fork servers as the agent sees them: for each Python in use one after the other.

The supervisor replaces the fork server of the node's own Python when it has ended. The fork server of another Python is
started with the first process that is to run there, and again with the next process after its end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from services.agent.ranks.fork_server import Children, ForkServer
from shared.bus.dropped import DroppedMessages
from shared.errors import Unavailable
from shared.service.changes import Changes

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Pause between attempts to connect to a fork server that ends while it starts: short beside the seconds that its
imports take."""

TAKE_OVER_S = 1.0
"""Time for the fork server of another Python to say what it has. It takes milliseconds, unless the fork server still
imports and has nothing. The node is not seen before the answer."""


class Supervision(Protocol):
    """What an agent needs of its supervisor (``services.agent.succession.inheritance``)."""

    def fork_server_name(self, python: str) -> str:
        """Return the name of the socket of a Python's fork server; empty: of the node's own."""

    def fork_server_log(self, python: str) -> str:
        """Return the name of the file with what it prints."""

    def ask_for_fork_server(self, python: str) -> None:
        """Have the fork server started, if none runs. Raises OSError if the supervisor has ended."""


class ForkServers:
    """Keeps the connections to the present fork servers. The Python "" stands for the node's own.

    Args:
        supervision: the names of their sockets, and the way to the supervisor.
        changes: notified when there is another fork server, and when there is none any more.
        exited: as for ``ForkServer``.
        stopped: as for ``ForkServer``.
        lost: called with the Python of a fork server that has ended, and its children with it.
        dropped: counts the messages that cannot be decoded.
    """

    def __init__(
        self,
        supervision: Supervision,
        changes: Changes,
        *,
        exited: Callable[[str, int], None],
        stopped: Callable[[], None],
        lost: Callable[[str], None],
        dropped: DroppedMessages,
    ) -> None:
        self._supervision, self._changes, self._dropped = supervision, changes, dropped
        self._exited, self._stopped, self._on_lost = exited, stopped, lost
        self._servers: dict[str, ForkServer] = {}
        self._starting = asyncio.Lock()

    async def connect(self, python: str = "") -> Children:
        """Connect to the fork server of a Python; return what it has.

        Raises:
            Unavailable: it ended before it was ready.
            OSError: nothing listens.
        """
        server = ForkServer(
            self._supervision.fork_server_name(python),
            exited=self._exited,
            stopped=self._stopped,
            lost=functools.partial(self._lost, python),
            dropped=self._dropped,
            log=self._supervision.fork_server_log(python),
        )
        try:
            children = await server.start()
        except BaseException:
            await server.stop()
            raise
        self._servers[python] = server
        self._changes.notify()
        return children

    async def take_over(self, pythons: Iterable[str]) -> Children:
        """Connect to the fork servers of a predecessor, as far as they still run; return what they have together.

        Raises:
            Unavailable: the one of the node's own Python ended before it was ready.
            OSError: nothing listens for it.
        """
        found = await self.connect()
        for python in {*pythons} - {""}:
            try:
                async with asyncio.timeout(TAKE_OVER_S):
                    children = await self.connect(python)
            except (Unavailable, OSError) as err:
                logger.error("no connection to the fork server in %s: %s", python, f"{type(err).__name__} {err}")
                continue
            found.living |= children.living
            found.ended |= children.ended
        return found

    async def reconnect(self) -> None:
        """Connect to the fork server that the supervisor starts in place of one that has ended."""
        while "" not in self._servers:
            try:
                await self.connect()
            except (Unavailable, OSError) as err:
                logger.error("no connection to the fork server: %s", err)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def current(self, python: str = "") -> ForkServer:
        """Return the connection; wait while the fork server is being replaced, or started. Callers limit the wait.

        Raises:
            Unavailable: the fork server of another Python could not be started.
        """
        if not python:
            await self._changes.until(lambda: "" in self._servers)
            return self._servers[""]
        async with self._starting:
            if python not in self._servers:
                try:
                    self._supervision.ask_for_fork_server(python)
                    await self.connect(python)
                except (Unavailable, OSError) as err:
                    raise Unavailable(f"no fork server in {python}: {err}") from err
            return self._servers[python]

    def acknowledge(self, process_id: str) -> None:
        """Have the fork server forget the end of a process, which it would repeat to a successor of the agent."""
        for server in self._servers.values():
            server.acknowledge(process_id)

    async def stop(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            await server.stop()

    def _lost(self, python: str) -> None:
        self._servers.pop(python, None)
        logger.error("the fork server%s ended; its ranks end with it", f" in {python}" if python else "")
        self._on_lost(python)
