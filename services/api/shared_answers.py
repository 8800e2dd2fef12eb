"""One answer for all who ask the same at the same time: the readers of the live page ask for the same lists.

A request that comes while its answer is made for others gets the next one, which is begun after the request has come:
no answer is older than its request. One reader alone never waits. Where several share an answer, the next one to the
same question is begun ``PAUSE_S`` after it at the earliest, and later where it takes long (``REST``), so that the work
does not grow with the number of readers. The pauses end at common times, the longer the fewer: answers that begin
together are mostly of one position of the log, for which costs are added up once (``services/api/memo.py``). An answer
that many wait for also waits while the feed is behind (``LONGEST_WAIT_S``): made at the same time, each would keep the
other up.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.feed import Feed

SHARED = frozenset({
    "/v1/tasks", "/v1/nodes", "/v1/incidents", "/v1/slow-workers", "/v1/plans", "/v1/costs", "/v1/waf", "/v1/status",
})  # fmt: skip
"""Paths whose answers to a GET depend on nothing but the query: everybody who may read may read all."""

PAUSE_S = 0.5
"""As long as a page waits before it asks again."""

REST = 9
"""The pause is at least so many times as long as an answer took: a question that many ask takes a tenth of a core."""

LONGEST_WAIT_S = 2.0
"""For a feed that is behind. To catch up with a thousand events takes it less than a second while no answer is made."""

LONGEST_GRID_S = 2.0
"""Common times are at most so far apart. The lists of incidents, the costs and the WAF take 0.1 to 0.3 s each at a
thousand events a second, and pause 1 to 3 s each: one open time serves all that begin at once."""

_MOST = 256
"""Questions that are remembered, with those that nobody asks at the moment."""

_OWN = frozenset({b"if-none-match", b"if-match", b"if-modified-since", b"range"})
"""Headers on which an answer depends: such a request gets one of its own."""


@dataclass(frozen=True)
class _Answer:
    """What the application has sent. ``route``: which the metrics count it as."""

    messages: list[Message]
    route: object


@dataclass
class _Question:
    """What is asked: the answer that was begun last, and the one that is to begin."""

    begun: asyncio.Task[_Answer] | None = None
    next: asyncio.Task[_Answer] | None = None
    waiting: int = 0
    """For ``next``."""
    shared: bool = False
    """The answer that was begun last."""
    pause_until_s: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return self.next is None and (self.begun is None or self.begun.done())

    async def turn(self) -> None:
        """Wait until the next answer may begin."""
        if self.begun is not None:
            await asyncio.wait([self.begun])
        await asyncio.sleep(max(self.pause_until_s - time.monotonic(), 0.0))
        self.shared = self.waiting > 1
        self.begun, self.next, self.waiting = self.next, None, 0

    def rest(self, began_s: float) -> None:
        """Let the next answer wait, after one that was begun at a time has been made."""
        now_s = time.monotonic()
        until_s = max(began_s + PAUSE_S, now_s + REST * (now_s - began_s))
        self.pause_until_s = _common(until_s, until_s - began_s) if self.shared else 0.0


class SharedAnswers:
    """ASGI middleware behind the one that says who may read.

    Args:
        app: what answers.
        feed: of the events of which the answers are.
    """

    def __init__(self, app: ASGIApp, feed: Feed) -> None:
        self._app, self._feed = app, feed
        self._questions: dict[tuple[str, bytes], _Question] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if not _is_shared(scope):
            await self._app(scope, receive, send)
            return
        # Others may wait for the answer, too, when this reader goes away.
        answer = await asyncio.shield(self._next(scope))
        if answer.route is not None:
            scope["route"] = answer.route
        for message in answer.messages:
            await send(message)

    def _next(self, scope: Scope) -> asyncio.Task[_Answer]:
        """Return the task of the first answer that is not begun yet."""
        key = (scope["path"], scope["query_string"])
        question = self._questions.get(key)
        if question is None:
            if len(self._questions) >= _MOST:
                self._questions = {key: known for key, known in self._questions.items() if not known.idle}
            question = self._questions[key] = _Question()
        if question.next is None:
            question.next = asyncio.create_task(self._answer(question, scope))
            question.next.add_done_callback(_retrieve)
        question.waiting += 1
        return question.next

    async def _answer(self, question: _Question, scope: Scope) -> _Answer:
        await question.turn()
        if question.shared:
            await self._feed.in_time(timeout_s=LONGEST_WAIT_S)
        began_s = time.monotonic()
        own = {**scope, "state": dict(scope.get("state", {}))}
        messages: list[Message] = []
        request: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if not request:
                await asyncio.Event().wait()  # no reader's disconnection ends what others wait for
            return request.pop()

        async def send(message: Message) -> None:
            messages.append(message)

        try:
            await self._app(own, receive, send)
        finally:
            question.rest(began_s)
        return _Answer(messages, own.get("route"))


def _common(time_s: float, pause_s: float) -> float:
    """Return the first time behind another at which pauses of this length end."""
    grid_s = PAUSE_S
    while 2.0 * grid_s <= min(pause_s, LONGEST_GRID_S):
        grid_s *= 2.0
    return math.ceil(time_s / grid_s) * grid_s


def _is_shared(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] not in SHARED:
        return False
    return not any(name in _OWN for name, _ in scope["headers"])


def _retrieve(task: asyncio.Task[_Answer]) -> None:
    """Take note of a failure, which is raised where it is waited for; perhaps nobody does any more."""
    if not task.cancelled():
        task.exception()
