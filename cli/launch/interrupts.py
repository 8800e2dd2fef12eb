"""Ctrl-C and SIGTERM while a task is followed: the first is answered, a Ctrl-C behind it ends the process at once.

The time limit of a batch job is another interruption (``time_limit.py``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from enum import StrEnum
from types import TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SIGNALLED = 128
"""Exit status of a process that a signal has ended: this and the signal's number, as shells have it."""


class OnInterrupt(StrEnum):
    """What becomes of a task whose follower is interrupted."""

    STOP = "stop"
    LEAVE = "leave"
    ASK = "ask"


def decided(wanted: OnInterrupt, number: int, *, embedded: bool, terminal: bool) -> OnInterrupt:
    """Return what becomes of a task: ``ASK`` only where somebody can be asked, and the task can be left running.

    Args:
        wanted: as the user has said it.
        number: of the signal; a program that sends SIGTERM can be asked nothing.
        embedded: whether the task ends with this process.
        terminal: whether a person can answer.
    """
    if embedded:
        return OnInterrupt.STOP
    if wanted is OnInterrupt.ASK and (number != signal.SIGINT or not terminal):
        return OnInterrupt.LEAVE
    return wanted


class Interrupts:
    """What interrupts a run, while this block lasts. ``at_limit``: it was a job's time limit."""

    at_limit = False

    def __init__(self) -> None:
        self._came: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._note, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    @property
    def came(self) -> asyncio.Future[int]:
        """A future that is done, with the signal's number, when one has come."""
        return self._came

    def limit_comes(self) -> None:
        """Interrupt the run as a SIGTERM does, since its job's time limit comes."""
        if not self._came.done():
            self.at_limit = True
            self._came.set_result(signal.SIGTERM)

    def _note(self, number: int) -> None:
        if not self._came.done():
            self._came.set_result(number)
            return
        if number == signal.SIGTERM == self._came.result():
            return  # the same one: `timeout` sends it to its child, and then to the group of its child
        # Every process of an embedded stack ends with this one (its parent-death signal).
        os._exit(SIGNALLED + number)


async def answer_of(question: str) -> str:
    """Return the line that a person types as the answer to a question."""
    print(question, end=" ", file=sys.stderr, flush=True)
    loop = asyncio.get_running_loop()
    typed: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        if not typed.done():
            typed.set_result(sys.stdin.readline())

    loop.add_reader(sys.stdin, read)
    try:
        return (await typed).strip().lower()
    finally:
        loop.remove_reader(sys.stdin)
