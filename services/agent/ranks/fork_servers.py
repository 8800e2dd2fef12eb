"""The node's fork servers as the agent sees them: one after the other, since the supervisor replaces one that ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.agent.ranks.fork_server import Children, ForkServer
from shared.bus.dropped import DroppedMessages
from shared.errors import Unavailable
from shared.service.changes import Changes

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Pause between attempts to connect to a fork server that ends while it starts: short beside the seconds that its
imports take."""


class ForkServers:
    """Keeps the connection to the present fork server.

    Args:
        name: of the socket on which they listen, one after the other.
        changes: notified when there is another one, and when there is none any more.
        exited: as for ``ForkServer``.
        stopped: as for ``ForkServer``.
        lost: called when the fork server has ended, and its children with it.
        dropped: counts the messages that cannot be decoded.
    """

    def __init__(
        self,
        name: str,
        changes: Changes,
        *,
        exited: Callable[[str, int], None],
        stopped: Callable[[], None],
        lost: Callable[[], None],
        dropped: DroppedMessages,
    ) -> None:
        self._name, self._changes, self._dropped = name, changes, dropped
        self._exited, self._stopped, self._on_lost = exited, stopped, lost
        self._server: ForkServer | None = None

    async def connect(self) -> Children:
        """Connect to the fork server; return what it has.

        Raises:
            Unavailable: it ended before it was ready.
            OSError: nothing listens.
        """
        server = ForkServer(
            self._name, exited=self._exited, stopped=self._stopped, lost=self._lost, dropped=self._dropped
        )
        try:
            children = await server.start()
        except BaseException:
            await server.stop()
            raise
        self._server = server
        self._changes.notify()
        return children

    async def reconnect(self) -> None:
        """Connect to the fork server that the supervisor starts in place of one that has ended."""
        while self._server is None:
            try:
                await self.connect()
            except (Unavailable, OSError) as err:
                logger.error("no connection to the fork server: %s", err)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def current(self) -> ForkServer:
        """Return the connection; wait while the fork server is being replaced. Callers limit the wait."""
        await self._changes.until(lambda: self._server is not None)
        assert self._server is not None
        return self._server

    def acknowledge(self, process_id: str) -> None:
        """Have the end of a process forgotten, which would be repeated to a successor of the agent."""
        if self._server is not None:
            self._server.acknowledge(process_id)

    async def stop(self) -> None:
        """Close the connection."""
        if self._server is not None:
            await self._server.stop()

    def _lost(self) -> None:
        self._server = None
        logger.error("the fork server ended; its ranks end with it")
        self._on_lost()
