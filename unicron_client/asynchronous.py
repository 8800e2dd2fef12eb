"""The gateway's interface for a program with an event loop: single requests, with JSON as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import httpx

from shared.errors import Unavailable
from unicron_client.transport import (
    PAGE_ITEMS,
    TIMEOUT_S,
    Params,
    address,
    content,
    credentials,
    given,
    raise_problem,
    transport_errors,
)


class AsyncConnection:
    """Single requests, as coroutines.

    Args:
        server: the server's address; None: that of ``UNICRON_SERVER``, or else the default port on this machine.
        poll_s: seconds between two tries.
        patience_s: seconds for which a request is repeated while the server cannot be reached, as when the stack starts
            it anew.

    Raises:
        InvalidInput: the address is not an HTTP address.
    """

    def __init__(self, server: str | None = None, *, poll_s: float, patience_s: float = 0.0) -> None:
        url = address(server)
        self.server = str(url)
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, **credentials(url))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str, params: Params | None = None) -> Any:
        """Return the JSON at ``path``."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._request("GET", path, params=given(params))
            except Unavailable:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(self._poll_s)

    async def post(self, path: str, body: Any = None) -> Any:
        """Send ``body`` and return the answer."""
        return await self._request("POST", path, json=body)

    async def _request(self, method: str, path: str, **arguments: Any) -> Any:
        with transport_errors(self.server):
            response = await self._http.request(method, path, **arguments)
        return content(response)

    @contextlib.asynccontextmanager
    async def lines(self, path: str, params: Params | None = None, *, accept: str) -> AsyncIterator[AsyncIterator[str]]:
        """Open a stream that may never end; give its lines."""
        timeout, headers = httpx.Timeout(TIMEOUT_S, read=None), {"Accept": accept}
        with transport_errors(self.server):
            async with self._http.stream(
                "GET", path, params=given(params), headers=headers, timeout=timeout
            ) as response:
                if response.is_error:
                    await response.aread()
                raise_problem(response)
                yield response.aiter_lines()

    async def items(self, path: str) -> list[dict[str, Any]]:
        """Return a whole list."""
        items: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self.get(path, {"limit": PAGE_ITEMS, "cursor": cursor})
            items += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return items
