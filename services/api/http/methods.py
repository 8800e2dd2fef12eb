"""The HTTP methods of a path: which there are, and HEAD, which every path with GET has."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CHANGES = ("DELETE", "PATCH", "POST", "PUT")
"""Methods that change something."""

HEAD_ONLY = "head_only"
"""Name in a request's state, where it is set: GET stands for HEAD, and must not use anything up."""


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> str:
    """Return the methods of a request's path, as in the header ``Allow``; empty: there is no such path."""
    methods = {
        method
        for method in ("GET", *CHANGES)
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    }
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted({*methods, "OPTIONS"})) if methods else ""


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as GET without the body. Of an answer that is streamed only the beginning is made."""
    begun = False

    async def sending(message: Message) -> None:
        nonlocal begun
        if begun:
            return
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})
            begun = True

    async def receiving() -> Message:
        return {"type": "http.disconnect"} if begun else await receive()

    await app({**scope, "method": "GET", "state": {**scope.get("state", {}), HEAD_ONLY: True}}, receiving, sending)
