"""Group commit: requests of several threads that wait at the same time go into one transaction.

    group = GroupCommit(commit)
    group.run(request)          returns when a call of ``commit`` with this request, among others, has returned

There is no thread of its own. The first thread that comes leads: it commits what waits, its own request first, and
then lets the first of the threads that have come meanwhile lead. So a request that finds nobody waits for nobody, and
requests that come while a transaction is on its way to the disk share the next one. ``log`` appends through it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")

MOST = 64
"""Most requests in one transaction. The cost of a commit is spread over them, and another process that waits for the
writer's lock waits for so many at most."""


class _Waiting(Generic[R]):
    """A request, and what its thread waits for: the end of a transaction, or its turn to lead."""

    def __init__(self, request: R) -> None:
        self.request = request
        self.ended = False
        self.leads = False
        # A plain lock that is released once: the cheapest way to wake one thread.
        self._woken = threading.Lock()
        self._woken.acquire()

    def wait(self) -> None:
        self._woken.acquire()

    def wake(self) -> None:
        self._woken.release()


class GroupCommit(Generic[R]):
    """Brings the requests of several threads together.

    Args:
        commit: called with some requests in the order in which they came, by one thread at a time. ``commit`` notes the
            outcome of each in the request. The thread that leads raises what ``commit`` raises; the other requests of
            the call then wait for the next one, so ``commit`` must be safe to repeat.
    """

    def __init__(self, commit: Callable[[list[R]], None]) -> None:
        self._commit = commit
        self._lock = threading.Lock()
        self._queue: list[_Waiting[R]] = []
        self._led = False

    def run(self, request: R) -> None:
        """Return when ``commit`` has returned from a call with this request."""
        own = _Waiting(request)
        with self._lock:
            self._queue.append(own)
            own.leads, self._led = not self._led, True
        try:
            if not own.leads:
                own.wait()
            if own.ended:
                return
        except BaseException:  # an interrupt of the main thread
            self._withdraw(own)
            raise
        self._lead(own)

    def _lead(self, own: _Waiting[R]) -> None:
        with self._lock:
            group, self._queue = self._queue[:MOST], self._queue[MOST:]
        try:
            self._commit([waiting.request for waiting in group])
        except BaseException:
            self._pass_on([waiting for waiting in group if waiting is not own])
            raise
        for waiting in group:
            waiting.ended = True
            if waiting is not own:
                waiting.wake()
        self._pass_on([])

    def _pass_on(self, again: list[_Waiting[R]]) -> None:
        """Let the first thread that waits lead; ``again``: requests that wait once more, before all others."""
        with self._lock:
            self._queue = again + self._queue
            self._led = bool(self._queue)
            if self._led:
                self._queue[0].leads = True
                self._queue[0].wake()

    def _withdraw(self, own: _Waiting[R]) -> None:
        """Give up a request whose thread no longer waits. The request may be committed all the same."""
        with self._lock:
            if own in self._queue:
                self._queue.remove(own)
        if own.leads and not own.ended:
            self._pass_on([])
