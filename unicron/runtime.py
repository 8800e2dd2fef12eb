"""What the training thread knows of its agent: which generation to join, whether to leave the step, drain or stop.

The agent's messages arrive on the connection's thread. The training thread meets them in three places: ``configure``
(blocks until there is a generation to join), ``check`` (between micro-batches) and, when it is blocked in a
collective, through its sockets, which the breaker thread shuts while the generation is held and the training thread
has not left the step. Everything is fenced by generation: what is older than the one joined is ignored.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from unicron import sockets
from unicron.connection import AgentConnection
from unicron.errors import Interrupted
from unicron.protocol import (
    SOCKET_VARIABLE,
    VERSION,
    Configure,
    Drain,
    Drained,
    Held,
    Hello,
    Hold,
    Message,
    Progress,
    Quit,
    Stop,
)

TASK_VARIABLE = "UNICRON_TASK"
WORKER_VARIABLE = "UNICRON_WORKER"
BREAK_AGAIN_S = 0.005
"""Between two rounds of shutting sockets: a thread may be about to enter a collective, or to connect."""

FLUSH_S = 1.0
"""How long the last messages of a process may take to leave it."""

Wait = Callable[[Any], None]
"""Waits for a collective (torch's Work) and raises what it raised: ``Runtime.wait``, for code that needs only that."""

WAIT_SLICE = timedelta(milliseconds=100)
"""How long a wait for a collective lasts before it looks whether the collective has been left behind."""

STUCK_S = 0.3
"""After its sockets were shut a collective ends within 20 ms, but for a rare one (about 1 of 100 under stress) whose
failure gloo does not pass on: with no socket left it waits out its time-out. After this long it is left behind."""

NOTHING, DRAIN, STOP = 0, 1, 2
"""What is requested of a task at the next boundary; the larger wins when ranks agree."""

EXIT_ORPHANED = 75
"""Exit code of a process whose agent did not come back (EX_TEMPFAIL)."""


def has_ended(work: Any) -> bool:
    """Wait for a collective (torch's Work) for one slice; return whether it has ended.

    Raises:
        RuntimeError: it failed.
    """
    try:
        work.wait(WAIT_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have ended after the slice did: what it raised itself, if anything, it keeps.
        work.wait(WAIT_SLICE)
    return True


class Runtime:
    """The link of one training process to its node agent; without an agent, one generation given at the start."""

    def __init__(self, alone: Configure | None = None) -> None:
        """Connect to the agent that the environment names.

        Args:
            alone: the one generation to join where there is no agent.

        Raises:
            OSError: the agent cannot be reached.
        """
        self._changed = threading.Condition()
        self._configure = alone
        self._generation = 0
        self._rank = 0
        self._inside = False
        self._held = 0
        self._unanswered_hold = 0
        self._request = NOTHING
        self._unanswered_request = NOTHING
        self._standing: Message | None = None
        self._abort: Callable[[], None] = lambda: None
        self._breakable: Callable[[int], bool] = lambda inode: False
        self._connection: AgentConnection | None = None
        self._breaker: threading.Thread | None = None
        self._broken_at: float | None = None
        self._sliced = False
        self._synchronize: Callable[[], None] | None = None
        self.abandoned: list[Any] = []
        """Collectives of this generation that were left behind: its groups may not be destroyed before they end."""
        if alone is None:
            hello = Hello(
                version=VERSION,
                task=os.environ.get(TASK_VARIABLE, ""),
                worker=os.environ.get(WORKER_VARIABLE, ""),
                pid=os.getpid(),
            )
            self._breaker = threading.Thread(target=self._break_sockets, name="unicron-breaker", daemon=True)
            self._breaker.start()
            self._connection = AgentConnection(
                os.environ[SOCKET_VARIABLE],
                hello,
                on_message=self._receive,
                on_attached=self._reattached,
                on_orphaned=self._orphaned,
            )

    @property
    def supervised(self) -> bool:
        """Whether there is an agent that can bring this process into another generation."""
        return self._connection is not None

    @property
    def generation(self) -> int:
        """The generation joined last; 0 before the first."""
        return self._generation

    @property
    def rank(self) -> int:
        """This process's rank in that generation."""
        return self._rank

    @property
    def request(self) -> int:
        """What the agent wants at the next boundary: ``NOTHING``, ``DRAIN`` or ``STOP``."""
        return self._request

    # The training thread.

    def send(self, message: Message, *, may_drop: bool = False) -> None:
        """Send a message to the agent, if there is one."""
        if self._connection is not None:
            self._connection.send(message, may_drop=may_drop)

    def progress(
        self,
        step: int,
        phase: str,
        *,
        micro_batch: int | None = None,
        loss: float | None = None,
        duration_s: float | None = None,
        buckets: int | None = None,
    ) -> None:
        """Tell where this rank is; ``step`` counts from 1."""
        if self._connection is not None:
            message = Progress(
                generation=self._generation,
                rank=self._rank,
                step=step,
                phase=phase,
                micro_batch=micro_batch,
                loss=loss,
                duration_s=duration_s,
                buckets=buckets,
            )
            self._connection.send(message, may_drop=phase == "compute" or buckets is not None)

    def configure(self, step: int, *, drained: bool = False) -> Configure | None:
        """Block until there is a generation to join, and join it.

        Args:
            step: updates applied so far, for the answers given while waiting.
            drained: whether this process stands at a step boundary because all ranks agreed to.

        Returns:
            The generation, or None when the process is asked to stop while it waits.
        """
        with self._changed:
            self._request = NOTHING
            if drained:
                self._say(Drained(generation=self._generation, step=step))
            # The drain is answered; a stop of a step that a fault broke is superseded by what answers the fault.
            if self._unanswered_request == (DRAIN if drained else STOP):
                self._unanswered_request = NOTHING
        self.progress(step + 1, "waiting")
        with self._changed:
            while True:
                found = self._configure
                if found is not None and found.generation > max(self._held, self._generation):
                    self._configure = None
                    self._generation, self._rank = found.generation, found.rank
                    self._unanswered_hold, self._standing = 0, None
                    self._request = self._unanswered_request = NOTHING
                    return found
                if self._unanswered_hold:
                    self._say(Held(generation=self._unanswered_hold, step=step))
                    self._unanswered_hold = 0
                if self._unanswered_request == DRAIN:
                    held = self._held >= self._generation and not drained
                    answer = Held if held else Drained
                    self._say(answer(generation=self._generation, step=step))
                    self._unanswered_request = NOTHING
                if self._unanswered_request == STOP:
                    return None
                self._changed.wait()

    def check(self) -> None:
        """Leave the step if the generation is held.

        Raises:
            Interrupted: it is.
        """
        if self.is_held():
            raise Interrupted(f"generation {self._generation} is held")

    def is_held(self) -> bool:
        """Whether the generation this process is in is held."""
        return self._held >= self._generation

    def enter(self) -> None:
        """Tell that the training thread may block on its peers from here on: only then are sockets broken."""
        with self._changed:
            self._inside, self._broken_at = True, None
            self._changed.notify_all()

    def leave(self) -> None:
        """Tell that the training thread does not wait for its peers any more."""
        with self._changed:
            self._inside = False

    @property
    def slices(self) -> bool:
        """Whether collectives are waited for in slices."""
        return self._connection is not None and self._sliced

    def wait(self, work: Any) -> None:
        """Wait for a collective (torch's Work), at most until the generation is held and its sockets are broken.

        Raises:
            RuntimeError: the collective failed.
            Interrupted: it neither failed nor ended, though its sockets are gone.
        """
        if not self.slices:
            work.wait()
            self.synchronize()
            return
        while not has_ended(work):
            broken_at = self._broken_at
            if self.is_held() and broken_at is not None and time.monotonic() - broken_at > STUCK_S:
                self.abandoned.append(work)
                raise Interrupted(f"generation {self._generation} is held; a collective of it does not end")

    @property
    def blind(self) -> bool:
        """Whether collectives that are aborted end without an error, and leave garbage."""
        return self._connection is not None and self._synchronize is not None

    def synchronize(self) -> None:
        """Wait for the device where collectives are aborted without an error, and leave the step if they may have been.

        What came of them may count only after this.

        Raises:
            Interrupted: the generation is held.
            RuntimeError: something failed on the device.
        """
        if self._connection is not None and self._synchronize is not None:
            self._synchronize()
            self.check()

    def breaks(
        self,
        breakable: Callable[[int], bool],
        abort: Callable[[], None],
        *,
        sliced: bool = False,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """Set how collectives of this generation are broken off.

        Args:
            breakable: which sockets, by inode, carry them.
            abort: ends what has no sockets.
            sliced: whether the backend's Work can be waited for in slices (gloo's can).
            synchronize: waits for the device, where what was aborted gives no error (NCCL).
        """
        with self._changed:
            self._breakable, self._abort, self._sliced, self._synchronize = breakable, abort, sliced, synchronize

    def exit(self, code: int) -> NoReturn:
        """End the process at once, after the last messages have left: no destructor can block on a broken group."""
        if self._connection is not None:
            self._connection.flush(FLUSH_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close(self) -> None:
        """Drop the agent (tests and embedding programs; a trainer's process simply ends)."""
        if self._connection is not None:
            self._connection.close()

    def _say(self, message: Message) -> None:
        self._standing = message
        self.send(message)

    # The connection's thread.

    def _receive(self, message: Message) -> None:
        with self._changed:
            match message:
                case Quit():
                    os._exit(0)
                case Configure() if message.generation > max(self._held, self._generation):
                    self._configure = message
                    # A newer generation ends the one this process is in, even if its Hold was lost.
                    if self._generation:
                        self._held = max(self._held, message.generation - 1)
                case Hold() if message.generation >= self._generation:
                    self._held = max(self._held, message.generation)
                    self._unanswered_hold = message.generation
                case Drain() | Stop() if message.generation >= self._generation:
                    wanted = DRAIN if isinstance(message, Drain) else STOP
                    self._request = max(self._request, wanted)
                    self._unanswered_request = max(self._unanswered_request, wanted)
            self._changed.notify_all()

    def _reattached(self) -> None:
        with self._changed:
            if self._standing is not None:
                self.send(self._standing)

    def _orphaned(self) -> None:
        print("unicron: the node agent did not come back; this process ends", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHANED)

    # The breaker's thread.

    def _break_sockets(self) -> None:
        while True:
            with self._changed:
                while not (self._inside and self.is_held()):
                    self._changed.wait()
                sockets.shut(self._breakable)
                self._broken_at = self._broken_at or time.monotonic()
                abort = self._abort
            abort()  # without the lock: it may take a moment, and the training thread need not wait for it
            time.sleep(BREAK_AGAIN_S)


_current: Runtime | None = None


def from_environment(alone: Configure) -> Runtime:
    """Make the runtime of this process: with the agent the environment names, or alone."""
    global _current
    _current = Runtime(None if os.environ.get(SOCKET_VARIABLE) else alone)
    return _current


def current() -> Runtime | None:
    """Return the runtime of this process; None before there is one."""
    return _current
