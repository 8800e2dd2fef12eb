"""Computations that requests ask for: in processes of their own, a few at a time, each of bounded duration.

The solver and the throughput search take anything from a millisecond to hours, depending on what is asked. In threads
they would keep the interpreter's lock from every other request, and could not be ended. A process can: when its time is
over, and when the client has left.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from anyio import to_process
from fastapi import Request

from shared.errors import Busy, TimeLimit, TooManyRequests
from shared.machine.process import die_with_parent

LIMIT_S = 20.0
"""Longest duration of a computation, and longest wait for a process: clients and proxies give up after 30 to 60 s. The
largest problem that is accepted takes the solver a second (``benchmarks/planner.py``)."""

MOST_PENDING = 16
"""Most computations that run or wait for a process. At a second each, which most are far below, the last is done within
the limit."""

MOST_OF_ONE_PEER = 4
"""Most computations of one address that run or wait: one client leaves room for others."""

NICENESS = 10
"""The niceness of the processes (nice(2)): on a busy machine the services and the gateway itself come first."""

T = TypeVar("T")


def most_at_once() -> int:
    """Return how many processes compute at once: half of the cores, since the services have to go on."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


@dataclass
class Computations:
    """Runs computations for requests. Only the event loop may use it."""

    limit_s: float = LIMIT_S
    most_at_once: int = field(default_factory=most_at_once)
    _peers: Counter[str] = field(default_factory=Counter, init=False)
    _slots: anyio.Semaphore | None = field(default=None, init=False)
    """Made in the event loop."""

    async def run(self, request: Request, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns, or raise what it raises.

        Args:
            request: whose body has been read. If its client leaves, the computation is ended.
            compute: can be pickled, and so can its result.

        Raises:
            TooManyRequests: the client's address has enough computations that are not done.
            Busy: all addresses together have.
            TimeLimit: the computation was ended because of its duration.
        """
        with self.admitted(request.client.host if request.client is not None else ""):
            try:
                return await self._until_left(request, compute)
            except anyio.BrokenWorkerProcess as err:
                raise Busy("the process of the computation has ended; this machine may be out of memory") from err

    @contextmanager
    def admitted(self, peer: str) -> Iterator[None]:
        """Count a computation of an address while it runs or waits.

        Raises:
            TooManyRequests, Busy: it is one too many.
        """
        if self._peers[peer] >= MOST_OF_ONE_PEER:
            raise TooManyRequests(f"{self._peers[peer]} computations of this address are not done; wait for one")
        if self._peers.total() >= MOST_PENDING:
            raise Busy(f"{self._peers.total()} computations are not done, the most that are accepted; try again")
        self._peers[peer] += 1
        try:
            yield
        finally:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    async def _compute(self, compute: Callable[[], T]) -> T:
        if self._slots is None:
            self._slots = anyio.Semaphore(self.most_at_once)
        try:
            with anyio.fail_after(self.limit_s):
                await self._slots.acquire()
        except TimeoutError:
            raise Busy(f"no process was free within {self.limit_s:g} s; try again") from None
        try:
            whole = anyio.CapacityLimiter(1)  # who has a slot waits for nobody
            with anyio.CancelScope(shield=True):  # a process whose start is cancelled would stay, and not be used
                await to_process.run_sync(_prepare, limiter=whole)
            with anyio.fail_after(self.limit_s):
                return await to_process.run_sync(compute, cancellable=True, limiter=whole)
        except TimeoutError:
            raise TimeLimit(
                f"the computation was ended after {self.limit_s:g} s, the longest that is allowed: ask for less"
            ) from None
        finally:
            self._slots.release()

    async def _until_left(self, request: Request, compute: Callable[[], T]) -> T:
        """Compute until that is done, the time is over or the client has left."""
        failure: Exception = Busy("the client has left")  # nobody reads this answer

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            try:
                return await self._compute(compute)
            except Exception as err:  # the group would wrap it
                failure = err
            finally:
                group.cancel_scope.cancel()
        raise failure


def _prepare() -> None:
    """Have this process give way to others, and end with the gateway."""
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    if not die_with_parent(signal.SIGKILL):
        os._exit(1)
