"""The connection of a training process to its node agent: one Unix socket, and one thread that receives from it.

Sending never blocks the training thread. Bytes that the socket does not accept at once wait in a backlog, which the
connection's thread flushes. Messages are those of ``unicron.protocol.messages``; ``unicron.link.agent_link`` interprets
them.

Progress inside a step (``unicron.link.connection``) is kept back until something else is sent, or until
``UNICRON_REPORT_INTERVAL_S`` has passed since progress was sent last: at once if it has, else by the connection's
thread. Short steps thus cost one write each.

When the agent ends, its successor gets a new connection: first ``Hello``, then the messages that no agent has answered
with ``Received``, in order, then the newest progress.

Of a rank's progress the agent needs no more than the newest. The agent passes progress on with its heartbeats, every
0.25 s, so of several reports in between only the newest counts, and of the steps that have ended only the last one.
What is in between costs a write, and a wake-up of the agent.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from unicron.protocol import environment
from unicron.protocol.messages import MAX_LINE_BYTES, Hello, Message, Progress, ProtocolError, Received, decode, encode

MAX_NAMES = 32
"""Most names of unknown messages that are reported, each once."""

RETRY_S = 0.05
"""Pause between two attempts to reach the agent's successor. Chosen: short beside the default grace period (5 s), long
beside the duration of a connect within one machine."""


FLUSH_PAUSE_S = 0.001
"""Pause between two looks at whether the last messages have left the process: short beside the end of a process."""

MAX_KEPT = 64
"""Most messages that are kept for an agent that has never sent ``Received`` (a version that does not know it)."""


INSIDE_A_STEP = frozenset({"compute", "reduce", "update", "ended"})
"""Phases that may be kept back. The beginning of a step is reported at once, and with it the end of the step before: so
the agent knows the step of a process that is killed, or that holds the interpreter's lock for ever."""


class NewestProgress:
    """Progress that is sent, or kept back for a while. It is not safe for threads: the connection's lock guards it."""

    def __init__(self, interval_s: float) -> None:
        """Args: interval_s: for how long progress may be kept back."""
        self._interval_s = interval_s
        self._ended: Progress | None = None
        """The progress behind the last step that has ended, until it is sent."""
        self._newest: Progress | None = None
        self.is_kept_back = False
        """Whether there is progress that has not been sent."""
        self._sent_s = -math.inf
        """When progress was sent last, on the monotonic clock."""

    def note(self, progress: Progress) -> None:
        """Take progress in place of the one before."""
        if progress.phase == "ended":
            self._ended = progress
        self._newest, self.is_kept_back = progress, True

    def is_due(self, now_s: float) -> bool:
        """Return whether the newest progress is not to be kept back (any longer)."""
        newest = self._newest
        return newest is not None and (newest.phase not in INSIDE_A_STEP or self.remaining_s(now_s) <= 0.0)

    def remaining_s(self, now_s: float) -> float:
        """Return for how long progress may still be kept back; not positive: it is due."""
        return self._sent_s + self._interval_s - now_s

    def take(self, now_s: float) -> bytes:
        """Return what was kept back, as lines of the protocol; from here on it counts as sent."""
        if not self.is_kept_back:
            return b""
        return self.repeat(now_s)

    def repeat(self, now_s: float) -> bytes:
        """Return what ``take`` returns, and the newest progress also if it was sent before: to another agent."""
        reports = (self._ended if self._ended is not self._newest else None, self._newest)
        self._ended, self.is_kept_back, self._sent_s = None, False, now_s
        return b"".join(encode(report) for report in reports if report is not None)


def socket_address(address: str) -> str:
    """Return a Unix socket's address for ``connect``; a leading ``@`` stands for Linux's abstract namespace."""
    return "\0" + address[1:] if address.startswith("@") else address


class AgentConnection:
    """A connection that attaches to the agent with ``Hello``, and again to the agent's successor when it is lost."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        on_message: Callable[[Message], None],
        on_orphaned: Callable[[], None],
    ) -> None:
        """Connect, and start the thread on which the callbacks run.

        Args:
            address: the agent's socket.
            hello: the first message on every connection.
            on_message: called with each message received.
            on_orphaned: called when no agent could be reached for the grace period
                (``unicron.protocol.environment.ORPHAN_GRACE_S``).

        Raises:
            OSError: no agent listens at the address.
        """
        self._address = socket_address(address)
        self._hello = hello
        self._on_message, self._on_orphaned = on_message, on_orphaned
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._unanswered: deque[bytes] = deque()
        """Messages that the agent's successor would get again."""
        self._progress = NewestProgress(environment.number(environment.REPORT_INTERVAL_S))
        self._waits_timed = False
        """Whether the connection's thread wakes by itself when progress that is kept back is due."""
        self._answers = False
        """Whether an agent has ever sent ``Received``."""
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = False
        self._reported: set[str] = set()
        self._socket: socket.socket | None = self._connect()
        self._thread = threading.Thread(target=self._run, name="unicron-agent", daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.connect(self._address)
            connection.sendall(encode(self._hello))
        except OSError:
            connection.close()
            raise
        connection.setblocking(False)
        return connection

    def send(self, message: Message) -> None:
        """Send a message, at once or from the backlog; progress may be kept back for a moment."""
        with self._lock:
            if isinstance(message, Progress):
                self._progress.note(message)
                if not self._progress.is_due(time.monotonic()):
                    wake = not self._waits_timed
                    self._waits_timed = True
                else:
                    wake = self._send_progress()
            else:
                line = encode(message)
                self._keep(line)
                wake = self._write(self._progress.take(time.monotonic()) + line)
        if wake:
            self._wake()

    def _send_progress(self) -> bool:
        """Send the progress that is kept back; return whether the connection's thread has to be woken for it.

        While there is a backlog it is kept back further: the agent is slow to read, and newer progress will replace it.
        """
        if self._backlog or self._socket is None:
            return False
        return self._write(self._progress.take(time.monotonic()))

    def _write(self, lines: bytes) -> bool:
        """Send lines, or what the socket takes of them; return whether the rest is a backlog for the thread."""
        if self._socket is not None and not self._backlog:
            # A broken connection takes nothing: the thread notices that too, and reconnects.
            with contextlib.suppress(OSError):
                lines = lines[self._socket.send(lines) :]
        if lines:
            self._backlog.append(lines)
        return bool(lines)

    def _keep(self, line: bytes) -> None:
        """Keep a message for the agent's successor; of an agent that never answers, keep only the newest ones."""
        if len(line) > MAX_LINE_BYTES:
            return  # the agent drops the connection because of the message, and so would the successor, again and again
        if not self._answers and len(self._unanswered) == MAX_KEPT:
            self._unanswered.popleft()
        self._unanswered.append(line)

    def flush(self, timeout_s: float, answer_timeout_s: float) -> None:
        """Wait until the last messages have left; called once, before the process ends.

        Args:
            timeout_s: how long they may take to be sent.
            answer_timeout_s: how long an agent that answers them, or the start of its successor, may take.
        """
        begun_s = time.monotonic()
        while self._backlog or (self._answers and self._unanswered):
            if time.monotonic() - begun_s > (answer_timeout_s if self._answers else timeout_s):
                return
            self._flush()
            time.sleep(FLUSH_PAUSE_S)

    def close(self) -> None:
        """Close the connection and end its thread."""
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def _flush(self) -> None:
        with self._lock:
            while self._backlog and self._socket is not None:
                try:
                    sent = self._socket.send(self._backlog[0])
                except OSError:
                    return  # the socket is full, or broken: the thread goes on either way
                if sent < len(self._backlog[0]):
                    self._backlog[0] = self._backlog[0][sent:]
                else:
                    self._backlog.popleft()

    def _run(self) -> None:
        while not self._closing:
            connection = self._socket
            assert connection is not None
            self._listen(connection)
            if self._closing:
                return
            with self._lock:
                connection.close()
                self._socket = None
            if not self._reconnect():
                self._on_orphaned()
                return

    def _reconnect(self) -> bool:
        """Connect to the agent's successor; return whether there was one within the grace period."""
        deadline = time.monotonic() + environment.number(environment.ORPHAN_GRACE_S)
        while time.monotonic() < deadline and not self._closing:
            try:
                connection = self._connect()
            except OSError:
                time.sleep(RETRY_S)
                continue
            with self._lock:
                self._socket = connection
                # This replaces what was to be sent to the predecessor, which may begin in the middle of a line.
                progress = self._progress.repeat(time.monotonic())
                self._backlog = deque([*self._unanswered, progress] if progress else self._unanswered)
            return True
        return False

    def _listen(self, connection: socket.socket) -> None:
        """Deliver messages and flush the backlog until the connection ends or is closed."""
        buffer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_r, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while not self._closing:
                timeout_s = self._send_due_progress()
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._backlog else 0)
                selector.modify(connection, events)
                for key, ready in selector.select(timeout_s):
                    if key.fd == self._wake_r:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_r, 4096)
                        continue
                    if ready & selectors.EVENT_WRITE:
                        self._flush()
                    if ready & selectors.EVENT_READ and not self._receive(connection, buffer):
                        return

    def _send_due_progress(self) -> float | None:
        """Send progress that was kept back long enough; return for how long the thread may wait for events.

        As long as progress comes often, the thread wakes at its interval, so that nobody has to wake it.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._progress.is_kept_back and self._progress.is_due(now_s):
                self._send_progress()
            remaining_s = self._progress.remaining_s(now_s)
            self._waits_timed = remaining_s > 0.0
            return remaining_s if self._waits_timed else None

    def _receive(self, connection: socket.socket, buffer: bytearray) -> bool:
        """Deliver the messages that have arrived; return False if the connection has ended or is of no use."""
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[: end + 1])
            del buffer[: end + 1]
            try:
                message = decode(line)
            except ProtocolError as err:
                self._report(err)
                continue
            if isinstance(message, Received):
                self._note_answer()
            else:
                self._on_message(message)
        return len(buffer) <= MAX_LINE_BYTES

    def _note_answer(self) -> None:
        with self._lock:
            self._answers = True
            if self._unanswered:
                self._unanswered.popleft()

    def _report(self, err: ProtocolError) -> None:
        """Print, once for each kind, that a message is ignored: the agent is of a newer version."""
        if err.name not in self._reported and len(self._reported) < MAX_NAMES:
            self._reported.add(err.name)
            print(f"unicron: a message of the node agent is ignored: {err}", file=sys.stderr, flush=True)
