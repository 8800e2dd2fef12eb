"""The link between the training thread and its node agent: which generation to join, and what the agent requests.

The agent's messages arrive on the thread of ``unicron.link.connection``. The training thread meets them in three
places: ``next_generation`` blocks until there is a generation to join; ``check`` leaves the step between two
micro-batches; and while the training thread blocks in a collective of a held generation, ``unicron.link.breaker`` makes
the collective fail. Messages about a generation older than the one joined are ignored.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from unicron import environment
from unicron.errors import Interrupted
from unicron.link.breaker import BREAK_AGAIN_S, Breaker, BreakMethod
from unicron.link.connection import AgentConnection
from unicron.link.waiting import has_ended
from unicron.protocol import (
    VERSION,
    Configure,
    Drain,
    Drained,
    Held,
    Hello,
    Hold,
    Incompatible,
    Message,
    Progress,
    Quit,
    Stop,
    StopRefused,
)

FLUSH_S = 1.0
"""Longest time that the last messages of a process may take to leave it."""

LAST_ANSWER_S = 60.0
"""Longest time that a process waits at its end for the agent's answer to its last messages. An agent answers within
milliseconds; one that is being restarted has a successor within seconds, on a busy machine within half a minute."""

STUCK_S = 0.3
"""How long after its sockets were shut a collective is given up. Measured: a collective ends within 20 ms of that, but
for about 1 of 100 under stress whose failure gloo does not pass on, and which waits until its time-out."""

NOTHING, DRAIN, STOP, STOP_UNSAVED = 0, 1, 2, 3
"""What is requested of a task at the next step boundary; ``STOP_UNSAVED``: to stop also if the state cannot be saved.
Where the ranks' requests differ, the largest one counts."""

EXIT_ORPHANED = 75
"""Exit code of a process whose agent did not come back (EX_TEMPFAIL of sysexits.h)."""


EXIT_INCOMPATIBLE = 76
"""Exit code of a process whose protocol version the agent does not read (EX_PROTOCOL of sysexits.h)."""


class AgentLink:
    """The link of one training process to its node agent; without an agent, one generation given at the start."""

    def __init__(self, standalone: Configure | None = None) -> None:
        """Connect to the agent that the environment names.

        Args:
            standalone: the one generation to join where there is no agent; None: there is an agent.

        Raises:
            OSError: the agent cannot be reached.
        """
        self._changed = threading.Condition()
        """Guards the attributes that both threads use, and is notified of their changes."""
        self._configure = standalone
        self._generation = 0
        self._rank = 0
        self._held_generation = 0
        """The newest generation that the agent holds; all older ones are held too."""
        self._unanswered_hold = 0
        self._requests: set[int] = set()
        self._unanswered_request = NOTHING
        self._breaker = Breaker(self._changed, self.is_held)
        self._connection: AgentConnection | None = None
        self.abandoned: list[Any] = []
        """Collectives of this generation that were given up: its groups may not be destroyed before they end."""
        if standalone is None:
            self._breaker.start()
            self._connection = AgentConnection(
                os.environ[environment.SOCKET],
                Hello(
                    version=VERSION,
                    task=environment.text(environment.TASK),
                    worker=environment.text(environment.WORKER),
                    pid=os.getpid(),
                ),
                on_message=self._receive,
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
        """What the agent requests for the next step boundary: ``NOTHING``, ``DRAIN``, ``STOP`` or ``STOP_UNSAVED``."""
        return max(tuple(self._requests), default=NOTHING)

    # The training thread: messages.

    def send(self, message: Message, *, may_drop: bool = False) -> None:
        """Send a message to the agent, if there is one.

        Args:
            message: the message.
            may_drop: whether the message may be lost where the agent is slow to read.
        """
        if self._connection is not None:
            self._connection.send(message, may_drop=may_drop)

    def progress(
        self,
        step: int,
        phase: str,
        *,
        micro_batch: int | None = None,
        setup_parts: int | None = None,
        loss: float | None = None,
        duration_s: float | None = None,
        buckets: int | None = None,
    ) -> None:
        """Report what this rank is doing; the arguments are the fields of ``unicron.protocol.Progress``."""
        if self._connection is not None:
            message = Progress(
                generation=self._generation,
                rank=self._rank,
                step=step,
                phase=phase,
                micro_batch=micro_batch,
                setup_parts=setup_parts,
                loss=loss,
                duration_s=duration_s,
                buckets=buckets,
            )
            self._connection.send(message, may_drop=phase == "compute" or buckets is not None)

    def exit(self, code: int) -> NoReturn:
        """End the process at once, after the last messages have left: no destructor can block on a broken group."""
        if self._connection is not None:
            self._connection.flush(FLUSH_S, LAST_ANSWER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def close(self) -> None:
        """Close the connection to the agent, in tests and embedding programs; a trainer's process simply ends."""
        if self._connection is not None:
            self._connection.close()

    # The training thread: between generations.

    def next_generation(self, step: int, *, drained: bool = False) -> Configure | None:
        """Wait for a generation to join and make it this process's; meanwhile answer holds, drains and stops.

        Args:
            step: updates applied so far, for the answers.
            drained: whether this process is at a step boundary because all ranks agreed to drain.

        Returns:
            The generation, or None where the agent asks the process to stop.
        """
        with self._changed:
            self._requests.clear()
            if drained:
                self.send(Drained(generation=self._generation, step=step))
            # A drain is answered now. A stop during a step that a fault broke gives way to the answer to the fault.
            unanswered = self._unanswered_request
            if unanswered == DRAIN if drained else unanswered >= STOP:
                self._unanswered_request = NOTHING
        self.progress(step + 1, "waiting")
        with self._changed:
            while True:
                configure = self._adopt_configured()
                if configure is not None:
                    return configure
                self._answer_waiting(step, drained=drained)
                if self._unanswered_request >= STOP:
                    return None
                self._changed.wait()

    def _adopt_configured(self) -> Configure | None:
        """Make the generation that the agent has configured this process's and return it; None: there is no new one."""
        configure = self._configure
        if configure is None or configure.generation <= max(self._held_generation, self._generation):
            return None
        self._configure = None
        self._generation, self._rank = configure.generation, configure.rank
        self._unanswered_hold = 0
        self._requests.clear()
        self._unanswered_request = NOTHING
        return configure

    def _answer_waiting(self, step: int, *, drained: bool) -> None:
        """Answer a hold and a drain that came while this process waits for a generation."""
        if self._unanswered_hold:
            self.send(Held(generation=self._unanswered_hold, step=step))
            self._unanswered_hold = 0
        if self._unanswered_request == DRAIN:
            left_by_hold = self.is_held() and not drained
            message_type = Held if left_by_hold else Drained
            self.send(message_type(generation=self._generation, step=step))
            self._unanswered_request = NOTHING

    # The training thread: in a generation.

    def refuse_stop(self, step: int, reason: str) -> None:
        """Report that the task has not stopped, since its state cannot be saved. Other requests stay requested.

        Args:
            step: updates applied so far.
            reason: why, in words.
        """
        with self._changed:
            self._requests.discard(STOP)
            self._unanswered_request = self.request
        self.send(StopRefused(generation=self._generation, rank=self._rank, step=step, reason=reason))

    def check(self) -> None:
        """Leave the step if the generation is held.

        Raises:
            Interrupted: the generation is held.
        """
        if self.is_held():
            raise Interrupted(f"generation {self._generation} is held")

    def is_held(self) -> bool:
        """Return whether the generation of this process is held."""
        return self._held_generation >= self._generation

    def enter(self) -> None:
        """Note that the training thread may block on its peers from here on: only then are collectives broken off."""
        self._breaker.enter()

    def leave(self) -> None:
        """Note that the training thread does not wait for its peers any more."""
        self._breaker.leave()

    def set_break_method(self, method: BreakMethod) -> None:
        """Set how the collectives of this generation are broken off."""
        self._breaker.set_method(method)

    @property
    def waits_in_slices(self) -> bool:
        """Whether collectives are waited for in slices."""
        return self._connection is not None and self._breaker.method.waits_in_slices

    @property
    def aborts_without_error(self) -> bool:
        """Whether collectives that are aborted end without an error, with garbage for a result."""
        return self._connection is not None and self._breaker.method.synchronize is not None

    def wait(self, work: Any) -> None:
        """Wait for a collective (torch's ``Work``) until it ends, or until it does not end though it is broken off.

        Raises:
            RuntimeError: the collective failed.
            Interrupted: the generation is held, and the collective has not ended ``STUCK_S`` after its sockets were
                shut; or, where collectives are aborted without an error, the generation is held.
        """
        if not self.waits_in_slices:
            work.wait()
            self._synchronize(self._breaker.method.synchronize_stream)
            return
        while not has_ended(work):
            broken_at_s = self._breaker.broken_at_s
            if self.is_held() and broken_at_s is not None and time.monotonic() - broken_at_s > STUCK_S:
                self.abandoned.append(work)
                raise Interrupted(f"generation {self._generation} is held; a collective of it does not end")

    def break_off(self, works: list[Any]) -> None:
        """Break off collectives of a generation that this process has left, so that none of them writes any more.

        Args:
            works: the collectives. Those that do not end in ``STUCK_S`` are ``abandoned``.
        """
        if works and self._connection is not None:
            self._breaker.break_now()
            limit_s = time.monotonic() + STUCK_S
            while time.monotonic() < limit_s and not all(work.is_completed() for work in works):
                time.sleep(BREAK_AGAIN_S)
        self.abandoned += [work for work in works if not work.is_completed()]

    def synchronize(self) -> None:
        """Wait for the device where collectives are aborted without an error; leave the step if they may have been.

        Results of collectives may be used only after this.

        Raises:
            Interrupted: the generation is held.
            RuntimeError: something failed on the device.
        """
        self._synchronize(self._breaker.method.synchronize)

    def _synchronize(self, synchronize: Callable[[], None] | None) -> None:
        if self._connection is not None and synchronize is not None:
            synchronize()
            self.check()

    # The connection's thread.

    def _receive(self, message: Message) -> None:
        """Note what the agent sends; messages about older generations are ignored."""
        with self._changed:
            match message:
                case Quit():
                    os._exit(0)
                case Incompatible():
                    print(
                        f"unicron: the node agent refuses this process: {message.reason}", file=sys.stderr, flush=True
                    )
                    os._exit(EXIT_INCOMPATIBLE)
                case Configure() if message.generation > max(self._held_generation, self._generation):
                    self._configure = message
                    # A newer generation ends the one that this process is in, even if the Hold was lost.
                    if self._generation:
                        self._held_generation = max(self._held_generation, message.generation - 1)
                case Hold() if message.generation >= self._generation:
                    self._held_generation = max(self._held_generation, message.generation)
                    self._unanswered_hold = message.generation
                case Drain() | Stop() if message.generation >= self._generation:
                    request = _request_of(message)
                    self._requests.add(request)
                    self._unanswered_request = max(self._unanswered_request, request)
            self._changed.notify_all()

    def _orphaned(self) -> None:
        print("unicron: the node agent did not come back; this process ends", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHANED)


def _request_of(message: Drain | Stop) -> int:
    if isinstance(message, Drain):
        return DRAIN
    return STOP_UNSAVED if message.lose_steps else STOP


_current: AgentLink | None = None


def from_environment(standalone: Configure) -> AgentLink:
    """Make and return the link of this process.

    Args:
        standalone: the one generation to join where the environment names no agent.

    Raises:
        OSError: the agent cannot be reached.
    """
    global _current
    _current = AgentLink(None if environment.text(environment.SOCKET) else standalone)
    return _current


def current() -> AgentLink | None:
    """Return the link of this process; None before there is one."""
    return _current
