"""Read-your-writes over several gateways: the position of the log that an answer has, and one that a read waits for.

A change's answer has the header ``Unicron-Position``. A read with ``min_position`` of that value, of any gateway over
the same log, shows what the change has made.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.gateway import Api
from services.api.http.methods import CHANGES
from services.api.route_parts.parameters import is_read
from services.api.store.feed import Feed
from shared.errors import Unavailable

HEADER = "Unicron-Position"

WAIT_S = 5.0
"""How long a read waits for a position: gateways follow the log within milliseconds, a busy one within a second or two.
A client does not give up before."""

_ERRORS = 400


async def at_least(
    api: Api,
    min_position: Annotated[
        int,
        Query(ge=0, lt=2**63, description=f"of the log, which the answer has at least ({HEADER} of a change)"),
    ] = 0,
) -> None:
    """Wait until the projections have a position (FastAPI dependency).

    Raises:
        Unavailable: they do not have it in ``WAIT_S``, or the log does not have it.
    """
    if min_position <= api.feed.position:
        return
    last = await asyncio.to_thread(api.journal.log.last_position)
    if min_position > last:  # an event is in the log before an answer can name it
        raise Unavailable(f"the log has no position {min_position}; its last one is {last}")
    await api.feed.reach(min_position, timeout_s=WAIT_S)


def add_to_reads(router: APIRouter) -> APIRouter:
    """Have every read of a router wait for ``min_position``, and return the router."""
    for route in router.routes:
        if isinstance(route, APIRoute) and is_read(route):
            route.dependencies.append(Depends(at_least))
    return router


class PositionHeader:
    """ASGI middleware that adds the header to the answer of each change that was made.

    Every change waits until the projections have its event, so that their position is at least that of the event.

    Args:
        app: what answers.
        feed: of the projections.
    """

    def __init__(self, app: ASGIApp, feed: Feed) -> None:
        self._app, self._feed = app, feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] not in CHANGES:
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < _ERRORS:
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers[HEADER] = str(self._feed.position)
                message = {**message, "headers": headers.raw}
            await send(message)

        await self._app(scope, receive, sending)
