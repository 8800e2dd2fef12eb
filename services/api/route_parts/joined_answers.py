"""One answer for all who ask the same while it is made: viewers of the live page ask for the same lists at every event.

A request that comes while its question is answered for others gets the next answer, which begins after the request has
come (``shared.service.shared_reads``). Without it 20 viewers had 2,000 nodes and
64 tasks written 20 times at each event, and waited for each other (docs/monitoring.md has the figures).

A reader who says ``Cache-Control: max-age=N`` (RFC 9111, section 5.2.1.1) takes an answer that was begun up to N
seconds ago: while many events come, the work follows from the questions then, and not from how many ask them.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.service.shared_reads import SharedRead

JOINED = frozenset({
    "/v1/tasks", "/v1/nodes", "/v1/incidents", "/v1/slow-workers", "/v1/plans", "/v1/costs", "/v1/waf", "/v1/status",
    "/v1/troubles", "/v1/node-map",
})  # fmt: skip
"""Paths whose answers to a GET depend on nothing but the query: everybody who may read may read all."""

_OWN = frozenset({b"if-none-match", b"if-match", b"if-modified-since", b"range"})
"""Headers on which an answer depends: such a request gets one of its own."""

MOST_AGE_S = 10.0
"""No answer that is kept is older, whatever a reader takes."""

MOST_KEPT = 32
"""Answers that are kept, the newest: the page asks a dozen questions, and the longest answer is half a megabyte."""

_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=(\d{1,9})(?:$|[\s,])", re.IGNORECASE)

_Question = tuple[str, bytes]
"""The path and the query."""


@dataclass(frozen=True)
class _Answer:
    """What the application has sent. ``route``: which the metrics count it as; ``begun_s``: on the monotonic clock."""

    messages: list[Message]
    route: object
    begun_s: float

    @property
    def age_s(self) -> float:
        """How long ago it was begun."""
        return time.monotonic() - self.begun_s

    @property
    def is_good(self) -> bool:
        """Whether it is what was asked for, and no problem."""
        return bool(self.messages) and self.messages[0].get("status") == 200


class JoinedAnswers:
    """ASGI middleware behind the one that says who may read.

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._reads: dict[_Question, SharedRead[_Answer]] = {}
        """What is asked and not answered yet."""
        self._kept: OrderedDict[_Question, _Answer] = OrderedDict()
        """By question the newest answer, in the order in which they came."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if not _is_joined(scope):
            await self._app(scope, receive, send)
            return
        question = (scope["path"], scope["query_string"])
        answer, age = self._kept.get(question), list[tuple[bytes, bytes]]()
        if answer is None or answer.age_s > _taken_s(scope):
            read = self._reads.setdefault(question, SharedRead())
            answer = await read.value(lambda: self._answer(question, scope))
        else:
            age.append((b"age", str(math.ceil(answer.age_s)).encode()))
        if answer.route is not None:
            scope["route"] = answer.route
        first, *rest = answer.messages
        await send({**first, "headers": [*first.get("headers", ()), *age]})
        for message in rest:
            await send(message)

    async def _answer(self, question: _Question, scope: Scope) -> _Answer:
        try:
            answer = await self._made(scope)
        finally:
            if not self._reads[question].is_wanted:
                del self._reads[question]
        if answer.is_good:
            self._keep(question, answer)
        return answer

    def _keep(self, question: _Question, answer: _Answer) -> None:
        self._kept.pop(question, None)
        self._kept[question] = answer
        while len(self._kept) > MOST_KEPT or next(iter(self._kept.values())).age_s > MOST_AGE_S:
            self._kept.popitem(last=False)

    async def _made(self, scope: Scope) -> _Answer:
        """Have the application answer a request whose reader may go away meanwhile."""
        own = {**scope, "state": dict(scope.get("state", {}))}
        messages: list[Message] = []
        begun_s = time.monotonic()
        request: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if not request:
                await asyncio.Event().wait()  # no reader's disconnection ends what others wait for
            return request.pop()

        async def send(message: Message) -> None:
            messages.append(message)

        await self._app(own, receive, send)
        return _Answer(messages, own.get("route"), begun_s)


def _is_joined(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] not in JOINED:
        return False
    return not any(name in _OWN for name, _ in scope["headers"])


def _taken_s(scope: Scope) -> float:
    """Return how old an answer may be that the reader takes; negative: it takes none that is there already."""
    found = _MAX_AGE.search(Headers(scope=scope).get("cache-control", ""))
    return min(float(found[1]), MOST_AGE_S) if found and int(found[1]) else -1.0
