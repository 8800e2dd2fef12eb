"""A bus within a test's process: what is served on it is asked with any bytes, without a server of NATS."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from shared.bus.connection import Bus
from shared.bus.dropped import DroppedMessages
from shared.bus.endpoints import Endpoint
from shared.errors import Undecodable


class LocalBus(Bus):
    """Takes what is served; ``ask`` answers as ``Bus`` would."""

    def __init__(self) -> None:
        self.dropped = DroppedMessages({})
        self._served: dict[str, Callable[[str, bytes], Awaitable[bytes]]] = {}

    async def serve(
        self,
        endpoint: Endpoint[Any, Any],
        handle: Callable[[Any], Awaitable[Any]],
        *parts: str,
        refuse: Callable[[Undecodable], Any] | None = None,
        group: str = "",
    ) -> None:
        self._served[endpoint.at(*parts)] = endpoint.receiver(handle, refuse, self.dropped)

    async def ask(self, subject: str, data: bytes) -> bytes:
        return await self._served[subject](subject, data)
