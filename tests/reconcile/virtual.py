"""Time that passes only when nothing is left to do, and a network whose messages may be lost, repeated and delayed."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from shared.errors import Unavailable

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Waits for nothing: where the loop would wait, the loop's clock goes on."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits, and nothing will happen")
        self.loop.seconds += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, ``seconds``; it does no input or output."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.seconds = 0.0
        super().__init__(selector)

    def time(self) -> float:
        """Return the seconds since the loop was made."""
        return self.seconds


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, which is that of the agents' commands, too."""
    with (
        mock.patch("services.agent.commands.time", SimpleNamespace(monotonic=seconds)),
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        return runner.run(work)


def seconds() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


def now() -> datetime:
    """Return the virtual time as a date."""
    return EPOCH + timedelta(seconds=seconds())


FAILED: list[BaseException] = []
"""Errors of background work, which the test raises."""


def watched(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Do something in the background; an error in it goes to ``FAILED``."""
    task = asyncio.create_task(work)
    task.add_done_callback(_done)
    return task


def _done(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        FAILED.append(error)


@dataclass
class Network:
    """Between the nodes and the control plane.

    ``loss``, ``repeat``: probability that a message is lost, and that it comes twice. ``delay_s``: longest delay; so
    messages overtake one another. ``cut``: nodes of which no message passes in either direction.
    """

    rng: random.Random
    loss: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        self.cut: set[str] = set()

    def heal(self) -> None:
        """Deliver every message from now on, once and at once."""
        self.loss = self.repeat = self.delay_s = 0.0
        self.cut.clear()

    def post(self, node: str, deliver: Callable[[], object]) -> None:
        """Send a message from or to a node: ``deliver`` is called when it arrives, if it does."""
        for _ in range(1 + (self.rng.random() < self.repeat)):
            if node not in self.cut and self.rng.random() >= self.loss:
                delay_s = 0.001 + self.rng.random() * self.delay_s
                asyncio.get_running_loop().call_later(delay_s, deliver)

    async def request(self, node: str, handle: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Send a request from or to a node, and return the answer.

        Raises:
            Unavailable: no answer came in time.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrive(data: T) -> None:
            if not answer.done():
                answer.set_result(data)

        async def serve() -> None:
            try:
                data = await handle()
            except Unavailable:
                return
            self.post(node, lambda: arrive(data))

        tasks: set[asyncio.Task[None]] = set()
        self.post(node, lambda: tasks.add(watched(serve())))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as err:
            raise Unavailable("no answer") from err
