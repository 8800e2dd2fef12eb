"""The thread that breaks collectives off while the generation of this process is held.

The training thread blocks in collectives without Python code that could check for a hold. ``Breaker`` makes those
collectives fail instead: it shuts their sockets (``unicron.link.sockets``) or aborts their communicators. The process
groups of a generation say how, with a ``BreakMethod`` (``unicron.join.groups``); ``unicron.link.agent_link`` says when.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakMethod:
    """How the collectives of a generation are broken off; by default they cannot be."""

    is_breakable: Callable[[int], bool] = lambda inode: False
    """Whether the socket of an inode carries collectives."""
    abort: Callable[[], None] = lambda: None
    """Ends what has no socket that could be shut. Called without a lock, repeatedly; may take a moment."""
    waits_in_slices: bool = False
    """Whether the backend's ``Work`` can be waited for in slices (gloo's can)."""
    synchronize: Callable[[], None] | None = None
    """Waits for the device, where aborted collectives end without an error (NCCL's do); else None."""
    synchronize_stream: Callable[[], None] | None = None
    """The same for what was started on the current stream alone: other collectives stay in flight."""


class Breaker:
    """Breaks collectives off for as long as the generation is held and the training thread may block on its peers."""

    def __init__(self, changed: threading.Condition, is_held: Callable[[], bool]) -> None:
        """Prepare the thread; ``start`` starts it.

        Args:
            changed: guards what ``is_held`` reads, and is notified of its changes.
            is_held: whether the generation of this process is held.
        """
        self._changed, self._is_held = changed, is_held
        self._may_block = False
        self.method = BreakMethod()
        """How collectives are broken off at present; ``set_method`` sets it."""
        self.broken_at_s: float | None = None
        """When sockets were first shut since ``enter``, on the monotonic clock; None: they were not."""

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
            self._may_block, self.broken_at_s = True, None
            self._changed.notify_all()

    def leave(self) -> None:
        """Note that the training thread does not wait for its peers any more; no socket is shut after this."""
        with self._changed:
            self._may_block = False

    def break_now(self) -> None:
        """Break off the collectives of a generation that the training thread has left."""
        with self._changed:
            sockets.shut(self.method.is_breakable)
            abort = self.method.abort
        abort()

    def _run(self) -> NoReturn:
        while True:
            with self._changed:
                while not (self._may_block and self._is_held()):
                    self._changed.wait()
                sockets.shut(self.method.is_breakable)
                self.broken_at_s = self.broken_at_s or time.monotonic()
                abort = self.method.abort
            abort()  # without the lock: an abort may take a moment, and the training thread need not wait for it
            time.sleep(BREAK_AGAIN_S)
