"""The thread that breaks collectives off while the generation of this process is held.

The training thread blocks in collectives without Python code that could check for a hold. ``Breaker`` makes those
collectives end instead: it shuts their sockets (``unicron.process.sockets``), or aborts their communicators. The
process groups of a generation say how, with a ``BreakMethod`` (``unicron.join.groups``); ``unicron.link.agent_link``
says when, and ``unicron.link.sparing`` whether the groups of the rank's own replica are left out.

While communicators are aborted nothing else may be issued, made, destroyed or aborted: each is aborted once, and the
training thread waits in ``leave`` until an abort that has begun has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from unicron.backend import Backend
from unicron.process import sockets

BREAK_AGAIN_S = 0.005
"""Pause between two rounds of breaking: the training thread may be about to enter a collective, or to connect. Chosen:
short beside a recovery."""


SPARED_S = 0.05
"""Pause between two rounds while the replica is spared: its sockets are all connected, so one round is enough, and
later rounds only notice that the replica is stuck. A new hold ends the wait."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Breakable:
    """Groups whose collectives can be broken off together; by default there are none."""

    has_socket: Callable[[int], bool] = lambda inode: False
    """Whether the socket of an inode carries the groups' collectives."""
    interrupt: Callable[[], None] | None = None
    """Ends what has no socket that could be shut. It is called without a lock, repeatedly, and may take a moment."""
    groups: Sequence[Any] = ()
    """Process groups whose communicators are to be aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakMethod:
    """How the collectives of a generation are broken off; by default they cannot be."""

    shared: Breakable = Breakable()
    """The groups that have ranks of several replicas; while groups are made, all groups."""
    replica: Breakable = Breakable()
    """The groups of which all ranks are in this rank's replica."""
    abort: Callable[[Sequence[Any]], None] = lambda groups: None
    """Aborts the communicators of groups, together, and returns once that is done."""
    backend: Backend | None = None
    """The backend of the groups, once they are made."""


class Breaker:
    """Breaks collectives off for as long as the generation is held and the training thread may block on its peers."""

    def __init__(
        self,
        changed: threading.Condition,
        is_held: Callable[[], bool],
        spares: Callable[[], bool] = lambda: False,
        before_abort: Callable[[Breakable], None] = lambda part: None,
    ) -> None:
        """Prepare the thread; ``start`` starts it.

        Args:
            changed: guards what the other three functions read, and is notified of changes.
            is_held: whether the generation of this process is held.
            spares: whether the groups of this rank's replica are left out.
            before_abort: called, with ``changed``, before communicators are aborted: ``shared`` or ``replica``.
        """
        self._changed, self._is_held, self._spares, self._before_abort = changed, is_held, spares, before_abort
        self._may_block = False
        self._ending = False
        """Whether a thread aborts communicators at present, or ends what has no socket."""
        self._to_abort: list[Breakable] = []
        """The parts of the method whose communicators are intact."""
        self.method = BreakMethod()
        """How collectives are broken off at present; ``set_method`` sets it."""
        self.broken_at_s: float | None = None
        """When sockets were first shut since ``enter``, on the monotonic clock; None: they were not shut."""
        self.replica_broken_at_s: float | None = None
        """When the replica's own sockets were first shut since ``enter``; None: they were not shut."""

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="unicron-breaker", daemon=True).start()

    def set_method(self, method: BreakMethod) -> None:
        """Set how collectives are broken off from here on, once an abort that has begun has ended."""
        with self._changed:
            self._wait_for_end()
            self.method = method
            self._to_abort = [part for part in (method.shared, method.replica) if part.groups]

    def enter(self) -> None:
        """Note that the training thread may block on its peers from here on."""
        with self._changed:
            self._may_block, self.broken_at_s, self.replica_broken_at_s = True, None, None
            self._changed.notify_all()

    def leave(self) -> None:
        """Note that the training thread does not wait for its peers any more; no socket is shut after this.

        It waits until what a thread has begun to end has ended: it may otherwise meet the next generation.
        """
        with self._changed:
            self._may_block = False
            self._wait_for_end()

    def break_off(self, *, shared: bool = False, replica: bool = False) -> None:
        """Break groups off, in the calling thread, and return once that is done.

        Args:
            shared: whether to break off the groups of several replicas; the training thread calls this once it has left
                the generation.
            replica: whether to break off the replica's own groups: this rank has left, and peers may wait for it.
        """
        chosen = [
            part for part, is_chosen in ((self.method.shared, shared), (self.method.replica, replica)) if is_chosen
        ]
        with self._changed:
            self._wait_for_end()
            groups = self._begin(chosen)
        self._end(chosen, groups)

    def _wait_for_end(self) -> None:
        """Wait until no thread ends anything. The wait has no limit: an abort that does not end ends the process."""
        self._changed.wait_for(lambda: not self._ending)

    def _begin(self, parts: Sequence[Breakable]) -> list[Any]:
        """Shut sockets; return the groups that ``_end`` is to abort. It is called with the lock."""
        groups: list[Any] = []
        for part in parts:
            sockets.shut(part.has_socket)
            if part in self._to_abort:
                self._before_abort(part)
                self._to_abort.remove(part)
                groups += part.groups
        self._ending = bool(groups) or any(part.interrupt is not None for part in parts)
        return groups

    def _end(self, parts: Sequence[Breakable], groups: list[Any]) -> None:
        """End what has no socket. This is called without the lock, which the other threads need meanwhile."""
        if not self._ending:
            return
        try:
            for part in parts:
                if part.interrupt is not None:
                    part.interrupt()
            if groups:
                self.method.abort(groups)
        finally:
            with self._changed:
                self._ending = False
                self._changed.notify_all()

    def _parts(self, *, spared: bool) -> list[Breakable]:
        """Return what to break off.

        An abort waits for the device, and with it for the replica's collectives. If these were spared and then found to
        be stuck, nothing could end them. So all groups are aborted together, once the passes have ended.
        """
        if not spared:
            return [self.method.shared, self.method.replica]
        return [] if self.method.backend is not None and self.method.backend.aborts else [self.method.shared]

    def _run(self) -> NoReturn:
        while True:
            with self._changed:
                while not (self._may_block and self._is_held()):
                    self._changed.wait()
                spared = self._spares()
                parts = self._parts(spared=spared)
                self._wait_for_end()
                groups = self._begin(parts)
                now_s = time.monotonic()
                self.broken_at_s = self.broken_at_s or now_s
                if not spared:
                    self.replica_broken_at_s = self.replica_broken_at_s or now_s
            self._end(parts, groups)
            if spared:
                with self._changed:
                    self._changed.wait(SPARED_S)
            else:
                time.sleep(BREAK_AGAIN_S)
