"""The thread that breaks collectives off while the generation of this process is held.

The training thread blocks in collectives without Python code that could check for a hold. ``Breaker`` makes those
collectives fail instead: it shuts their sockets (``unicron.link.sockets``) or aborts their communicators. The process
groups of a generation say how, with a ``BreakMethod`` (``unicron.join.groups``); ``unicron.link.agent_link`` says when,
and ``unicron.link.sparing`` whether the groups of the rank's own replica are left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from unicron.link import sockets

BREAK_AGAIN_S = 0.005
"""Between two rounds of breaking: the training thread may be about to enter a collective, or to connect. Chosen: short
beside a recovery."""


SPARED_S = 0.05
"""Between two rounds while the replica is spared: its sockets are all connected, so one round does, and what is left is
to notice that the replica is stuck. A new hold ends the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakable:
    """Groups whose collectives can be broken off together; by default there are none."""

    has_socket: Callable[[int], bool] = lambda inode: False
    """Whether the socket of an inode carries their collectives."""
    abort: Callable[[], None] = lambda: None
    """Ends what has no socket that could be shut. Called without a lock, repeatedly; may take a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakMethod:
    """How the collectives of a generation are broken off; by default they cannot be."""

    shared: Breakable = Breakable()
    """The groups that have ranks of several replicas. While groups are made: all."""
    replica: Breakable = Breakable()
    """The groups of which all ranks are in this rank's replica."""
    waits_in_slices: bool = False
    """Whether the backend's ``Work`` can be waited for in slices (gloo's can)."""
    synchronize: Callable[[], None] | None = None
    """Waits for the device, where aborted collectives end without an error (NCCL's do); else None."""
    synchronize_stream: Callable[[], None] | None = None
    """The same for what was started on the current stream alone: other collectives stay in flight."""


class Breaker:
    """Breaks collectives off for as long as the generation is held and the training thread may block on its peers."""

    def __init__(
        self, changed: threading.Condition, is_held: Callable[[], bool], spares: Callable[[], bool] = lambda: False
    ) -> None:
        """Prepare the thread; ``start`` starts it.

        Args:
            changed: guards what the other two read, and is notified of its changes.
            is_held: whether the generation of this process is held.
            spares: whether the groups of this rank's replica are left out.
        """
        self._changed, self._is_held, self._spares = changed, is_held, spares
        self._may_block = False
        self.method = BreakMethod()
        """How collectives are broken off at present; ``set_method`` sets it."""
        self.broken_at_s: float | None = None
        """When sockets were first shut since ``enter``, on the monotonic clock; None: they were not."""
        self.replica_broken_at_s: float | None = None
        """The same of the replica's own."""

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="unicron-breaker", daemon=True).start()

    def set_method(self, method: BreakMethod) -> None:
        """Set how collectives are broken off from here on."""
        with self._changed:
            self.method = method

    def enter(self) -> None:
        """Note that the training thread may block on its peers from here on."""
        with self._changed:
            self._may_block, self.broken_at_s, self.replica_broken_at_s = True, None, None
            self._changed.notify_all()

    def leave(self) -> None:
        """Note that the training thread does not wait for its peers any more; no socket is shut after this."""
        with self._changed:
            self._may_block = False

    def break_replica(self) -> None:
        """Break the groups of the replica off, in the calling thread: this rank has left, and peers may wait for it."""
        sockets.shut(self.method.replica.has_socket)
        self.method.replica.abort()

    def break_shared(self) -> None:
        """Break the groups of several replicas off, in the calling thread, which has left the generation."""
        sockets.shut(self.method.shared.has_socket)
        self.method.shared.abort()

    def _run(self) -> NoReturn:
        while True:
            with self._changed:
                while not (self._may_block and self._is_held()):
                    self._changed.wait()
                spared = self._spares()
                parts = [self.method.shared] if spared else [self.method.shared, self.method.replica]
                for part in parts:
                    sockets.shut(part.has_socket)
                now_s = time.monotonic()
                self.broken_at_s = self.broken_at_s or now_s
                if not spared:
                    self.replica_broken_at_s = self.replica_broken_at_s or now_s
            for part in parts:
                part.abort()  # without the lock: an abort may take a moment, and the training thread need not wait
            if spared:
                with self._changed:
                    self._changed.wait(SPARED_S)
            else:
                time.sleep(BREAK_AGAIN_S)
