"""One answer for all who ask the same while it is made: viewers of the live page ask for the same lists at every event.

A request that comes while its question is answered for others gets the next answer, which begins after the request has
come: no answer is older than its request, and one reader alone never waits. Without it 20 viewers had 2,000 nodes and
64 tasks written 20 times at each event, and waited for each other (docs/monitoring.md has the figures).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

JOINED = frozenset({
    "/v1/tasks", "/v1/nodes", "/v1/incidents", "/v1/slow-workers", "/v1/plans", "/v1/costs", "/v1/waf", "/v1/status",
    "/v1/troubles", "/v1/node-map",
})  # fmt: skip
"""Paths whose answers to a GET depend on nothing but the query: everybody who may read may read all."""

_OWN = frozenset({b"if-none-match", b"if-match", b"if-modified-since", b"range"})
"""Headers on which an answer depends: such a request gets one of its own."""

_Question = tuple[str, bytes]
"""The path and the query."""


@dataclass(frozen=True)
class _Answer:
    """What the application has sent. ``route``: which the metrics count it as."""

    messages: list[Message]
    route: object


class JoinedAnswers:
    """ASGI middleware behind the one that says who may read.

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun: dict[_Question, asyncio.Task[_Answer]] = {}
        self._next: dict[_Question, asyncio.Task[_Answer]] = {}
        """Answers that are not begun yet: each waits for the one under way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if not _is_joined(scope):
            await self._app(scope, receive, send)
            return
        question = (scope["path"], scope["query_string"])
        task = self._next.get(question)
        if task is None:
            task = self._next[question] = asyncio.create_task(self._answer(question, scope))
            task.add_done_callback(_retrieve)
        answer = await asyncio.shield(task)  # others may wait for it when this reader goes away
        if answer.route is not None:
            scope["route"] = answer.route
        for message in answer.messages:
            await send(message)

    async def _answer(self, question: _Question, scope: Scope) -> _Answer:
        if (before := self._begun.get(question)) is not None:
            await asyncio.wait([before])
        begun = self._begun[question] = self._next.pop(question)
        try:
            return await self._made(scope)
        finally:
            if self._begun.get(question) is begun and question not in self._next:
                del self._begun[question]

    async def _made(self, scope: Scope) -> _Answer:
        """Have the application answer a request whose reader may go away meanwhile."""
        own = {**scope, "state": dict(scope.get("state", {}))}
        messages: list[Message] = []
        request: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if not request:
                await asyncio.Event().wait()  # no reader's disconnection ends what others wait for
            return request.pop()

        async def send(message: Message) -> None:
            messages.append(message)

        await self._app(own, receive, send)
        return _Answer(messages, own.get("route"))


def _is_joined(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] not in JOINED:
        return False
    return not any(name in _OWN for name, _ in scope["headers"])


def _retrieve(task: asyncio.Task[_Answer]) -> None:
    """Take note of a failure, which is raised where it is waited for; perhaps nobody does any more."""
    if not task.cancelled():
        task.exception()
