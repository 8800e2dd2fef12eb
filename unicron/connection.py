"""The connection to the node agent: one Unix socket and one thread that listens on it.

Sending never blocks the training thread: what the socket does not take at once waits in a backlog that the thread
flushes, and while there is a backlog, messages that may be dropped (single micro-batches) are.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from unicron.protocol import MAX_LINE_BYTES, Hello, Message, ProtocolError, decode, encode

GRACE_VARIABLE = "UNICRON_ORPHAN_GRACE_S"
"""Environment variable: how long a process without its agent goes on and tries to find a successor."""

DEFAULT_GRACE_S = 5.0
RETRY_S = 0.05
"""Between attempts to reach the agent's successor: short beside the grace, long beside a connect on one machine."""


def grace_s() -> float:
    """Return the grace from the environment."""
    return float(os.environ.get(GRACE_VARIABLE, DEFAULT_GRACE_S))


def socket_address(address: str) -> str:
    """Return the address for ``connect``: a leading ``@`` stands for Linux's abstract namespace."""
    return "\0" + address[1:] if address.startswith("@") else address


class AgentConnection:
    """Attaches to the agent with ``Hello``, and again to its successor when the connection is lost."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        on_message: Callable[[Message], None],
        on_attached: Callable[[], None],
        on_orphaned: Callable[[], None],
    ) -> None:
        """Connect and start the thread; the callbacks run on it.

        Args:
            address: the agent's socket.
            hello: sent first on every connection.
            on_message: called with each message.
            on_attached: called after a reconnection.
            on_orphaned: called when no agent could be reached for the grace period.

        Raises:
            OSError: nobody listens.
        """
        self._address = socket_address(address)
        self._hello = hello
        self._on_message, self._on_attached, self._on_orphaned = on_message, on_attached, on_orphaned
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = False
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

    def send(self, message: Message, *, may_drop: bool = False) -> None:
        """Send a message, now or when the agent takes it."""
        line = encode(message)
        with self._lock:
            if self._socket is not None and not self._backlog:
                try:
                    sent = self._socket.send(line)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    sent = 0  # the thread finds the broken connection and reconnects
                if sent == len(line):
                    return
                # A partly sent line must be completed; an untouched one may be dropped.
                if sent == 0 and may_drop:
                    return
                line = line[sent:]
            elif may_drop:
                return
            self._backlog.append(line)
        self._wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent, at most ``timeout_s``: called once, before the process ends."""
        deadline = time.monotonic() + timeout_s
        while self._backlog and time.monotonic() < deadline:
            self._flush()
            time.sleep(0.001)

    def close(self) -> None:
        """Close the connection and end the thread."""
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
                except BlockingIOError:
                    return
                except OSError:
                    return
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
                # A partly sent line means nothing to a successor; Hello and on_attached tell it where this rank is.
                self._backlog.clear()
            if not self._reconnect():
                self._on_orphaned()
                return
            self._on_attached()

    def _reconnect(self) -> bool:
        deadline = time.monotonic() + grace_s()
        while time.monotonic() < deadline and not self._closing:
            try:
                connection = self._connect()
            except OSError:
                time.sleep(RETRY_S)
                continue
            with self._lock:
                self._socket = connection
            return True
        return False

    def _listen(self, connection: socket.socket) -> None:
        """Deliver messages and flush the backlog until the connection ends."""
        buffer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_r, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while not self._closing:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._backlog else 0)
                selector.modify(connection, wanted)
                for key, events in selector.select():
                    if key.fd == self._wake_r:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_r, 4096)
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._flush()
                    if events & selectors.EVENT_READ and not self._receive(connection, buffer):
                        return

    def _receive(self, connection: socket.socket, buffer: bytearray) -> bool:
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
            except ProtocolError:
                return False  # an agent of another version: as good as none
            self._on_message(message)
        return len(buffer) <= MAX_LINE_BYTES
