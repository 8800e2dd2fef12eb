"""The link between the training thread and its node agent: which generation to join, and what the agent requests.

The agent's messages arrive on the thread of ``unicron.link.connection``. The training thread meets them in three
places: ``next_generation`` blocks until there is a generation to join; ``check`` leaves the step between two
micro-batches; and while the training thread blocks in a collective of a held generation, ``unicron.link.breaker`` makes
the collective fail. Both spare a replica that can finish its micro-batches (``unicron.link.sparing``). Messages about a
generation older than the one joined are ignored.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from unicron.link import flight_record, stacks
from unicron.link.collectives import Collectives
from unicron.link.connection import AgentConnection
from unicron.protocol import environment, messages
from unicron.protocol.versions import OLDEST, VERSION, __version__

FLUSH_S = 1.0
"""Longest time that the last messages of a process may take to leave it."""

LAST_ANSWER_S = 60.0
"""Longest time that a process waits at its end for the agent's answer to its last messages. An agent answers within
milliseconds; one that is being restarted has a successor within seconds, on a busy machine within half a minute."""

NOTHING, DRAIN, STOP, STOP_UNSAVED = 0, 1, 2, 3
"""Requests to a task for the next step boundary; ``STOP_UNSAVED``: to stop also if the state cannot be saved. If the
ranks' requests differ, the largest one counts."""

EXIT_ORPHANED = 75
"""Exit code of a process whose agent did not come back (EX_TEMPFAIL of sysexits.h)."""


EXIT_INCOMPATIBLE = 76
"""Exit code of a process that has no version of the protocol in common with the agent (EX_PROTOCOL of sysexits.h)."""


class AgentLink(Collectives):
    """The link of one training process to its node agent; without an agent, one generation given at the start."""

    def __init__(self, standalone: messages.Configure | None = None) -> None:
        """Connect to the agent that the environment names.

        Args:
            standalone: the one generation to join where there is no agent; None: there is an agent.

        Raises:
            OSError: the agent cannot be reached.
        """
        super().__init__(threading.Condition())
        self._configure = standalone
        self._generation = 0
        self._rank = 0
        self._held_generation = 0
        """The newest generation that the agent holds; all older ones are held too."""
        self._unanswered_hold = 0
        self._requests: set[int] = set()
        self._unanswered_drain = False
        self.sections: tuple[int, str | None] = 0, None
        """How many boundary sections this rank has entered behind the newest step that it has done, in this generation,
        and the place in the script of the newest; each report of progress has both."""
        self.on_inject: Callable[[messages.Inject], None] | None = None
        """Called, on the connection's thread, with each request for a fault; None: such requests are ignored."""
        self.at_end: Callable[[], None] | None = None
        """Called at the end of a script that goes on behind the last step; None: the last step is not done."""
        self.undone: Callable[[], tuple[int, int] | None] = lambda: None
        """Returns the step that is done and the last one, if a script that ends now leaves steps out; else None."""
        self._connection: AgentConnection | None = None
        if standalone is None:
            self._breaker.start()
            self._connection = AgentConnection(
                os.environ[environment.SOCKET],
                messages.Hello(
                    version=OLDEST,
                    newest=VERSION,
                    library=__version__,
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

    def send(self, message: messages.Message) -> None:
        """Send a message to the agent, if there is one."""
        if self._connection is not None:
            self._connection.send(message)

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
        compute_s: float | None = None,
        micro_batches: int | None = None,
        memory_every: int | None = None,
        replicated: bool | None = None,
    ) -> None:
        """Report what this rank is doing; the arguments are the fields of ``unicron.protocol.messages.Progress``.

        The agent gets the newest report, soon (``unicron.link.connection``), and not every one.
        """
        if self._connection is not None:
            self._connection.send(
                messages.Progress(
                    generation=self._generation,
                    rank=self._rank,
                    step=step,
                    phase=phase,
                    micro_batch=micro_batch,
                    setup_parts=setup_parts,
                    loss=loss,
                    duration_s=duration_s,
                    buckets=buckets,
                    compute_s=compute_s,
                    micro_batches=micro_batches,
                    memory_every=memory_every,
                    replicated=replicated,
                    sections=self.sections[0],
                    section=self.sections[1],
                )
            )

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

    def next_generation(self, step: int, *, drained: bool = False) -> messages.Configure:
        """Wait for a generation to join, make it this process's and return it; meanwhile answer holds and drains.

        A stop is not answered here. The step that this process has left is in its memory alone: it can be saved only
        together with the peers of a generation, so the process waits for the generation that answers the fault or
        follows the drain, in which it is asked again. A process that is not to save anything is ended by its agent.

        Args:
            step: updates applied so far, for the answers.
            drained: whether this process is at a step boundary because all ranks agreed to drain.
        """
        with self._changed:
            self._requests.clear()
            if drained:
                self.send(messages.Drained(generation=self._generation, step=step))
                self._unanswered_drain = False
        self.progress(step + 1, "waiting")
        with self._changed:
            while True:
                configure = self._adopt_configured()
                if configure is not None:
                    return configure
                self._answer_waiting(step, drained=drained)
                self._changed.wait()

    def _adopt_configured(self) -> messages.Configure | None:
        """Make the generation that the agent has configured this process's and return it; None: there is no new one."""
        configure = self._configure
        if configure is None or configure.generation <= max(self._held_generation, self._generation):
            return None
        self._configure = None
        self._generation, self._rank = configure.generation, configure.rank
        self.sections = 0, None
        self._sparing.join(worker for _, worker, _ in configure.members)
        self._unanswered_hold = 0
        self._requests.clear()
        self._unanswered_drain = False
        return configure

    def _answer_waiting(self, step: int, *, drained: bool) -> None:
        """Answer a hold and a drain that came while this process waits for a generation."""
        if self._unanswered_hold:
            self.send(messages.Held(generation=self._unanswered_hold, step=step))
            self._unanswered_hold = 0
        if self._unanswered_drain:
            left_by_hold = self.is_held() and not drained
            message_type = messages.Held if left_by_hold else messages.Drained
            self.send(message_type(generation=self._generation, step=step))
            self._unanswered_drain = False

    # The training thread: in a generation.

    def refuse_stop(self, step: int, reason: str) -> None:
        """Report that the task has not stopped, since its state cannot be saved. Other requests stay requested.

        Args:
            step: updates applied so far.
            reason: why, in words.
        """
        with self._changed:
            self._requests.discard(STOP)
        self.send(messages.StopRefused(generation=self._generation, rank=self._rank, step=step, reason=reason))

    def wait_for_request(self, timeout_s: float, done: Callable[[], bool]) -> None:
        """Wait until the generation is held, something is requested of it, or something else is done.

        Args:
            timeout_s: the longest wait, seconds.
            done: whether that is done; the thread that does it calls ``wake`` afterwards.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_held() or self._requests or done(), timeout_s)

    def wake(self) -> None:
        """Have ``wait_for_request`` look again; any thread may call it."""
        with self._changed:
            self._changed.notify_all()

    def is_held(self) -> bool:
        """Return whether the generation of this process is held."""
        return self._held_generation >= self._generation

    # The connection's thread.

    def _receive(self, message: messages.Message) -> None:
        """Note what the agent sends; messages about older generations are ignored."""
        if isinstance(message, messages.AskGroups):
            self.send(
                messages.Groups(
                    generation=self._generation,
                    request=message.request,
                    groups=flight_record.groups(),
                    stacks=stacks.of_other_threads(),
                )
            )
            return
        with self._changed:
            match message:
                case messages.Quit():
                    os._exit(0)
                case messages.Inject() if self.on_inject is not None:
                    self.on_inject(message)
                case messages.Incompatible():
                    print(
                        f"unicron: the node agent refuses this process: {message.reason}", file=sys.stderr, flush=True
                    )
                    os._exit(EXIT_INCOMPATIBLE)
                case messages.Configure() if message.generation > max(self._held_generation, self._generation):
                    self._configure = message
                    # A newer generation ends the one that this process is in, even if the Hold was lost.
                    if self._generation:
                        self._held_generation = max(self._held_generation, message.generation - 1)
                        self._sparing.break_off()
                case messages.Hold() if message.generation >= self._generation:
                    self._held_generation = max(self._held_generation, message.generation)
                    if message.generation == self._generation:
                        self._sparing.hold(message.lost, time.monotonic())
                    else:
                        self._sparing.break_off()
                    self._unanswered_hold = message.generation
                case messages.Drain() | messages.Stop() if message.generation >= self._generation:
                    request = _request_of(message)
                    self._requests.add(request)
                    self._unanswered_drain = self._unanswered_drain or request == DRAIN
            self._changed.notify_all()

    def _orphaned(self) -> None:
        print("unicron: the node agent did not come back; this process ends", file=sys.stderr, flush=True)
        os._exit(EXIT_ORPHANED)


def _request_of(message: messages.Drain | messages.Stop) -> int:
    if isinstance(message, messages.Drain):
        return DRAIN
    return STOP_UNSAVED if message.lose_steps else STOP


_current: AgentLink | None = None


def from_environment(standalone: messages.Configure) -> AgentLink:
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
