"""How a copy gets to a peer's shared memory: a TCP connection from the rank that made it to one that keeps it.

The receiver is a thread of the keeping rank; it writes what comes into its node's folder. Both ends know a token that
the ranks exchange in their process group. Copies travel as they lie in the file; the header is written last.

    token | then for each copy: name length (1 byte), size (8 bytes), name, content <- 1 byte: stored
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import secrets
import socket
import struct
import threading
from pathlib import Path

from unicron import copies

_ITEM = struct.Struct("<BQ")
TOKEN_BYTES = 16
CONNECT_TIMEOUT_S = 5.0
"""The peer has been listening since before its address was told; this is for a network that drops packets."""

SILENT_S, PROBE_S, PROBES = 60, 10, 3
"""A sender that is silent for a minute is asked three times in half a minute whether it is there. Nothing waits for
this: a generation whose member is gone has ended long before."""

STORED = b"1"


class Receiver:
    """Keeps what peers send, in a folder."""

    def __init__(self, host: str, folder: Path) -> None:
        """Listen on a free port of ``host``.

        Raises:
            OSError: that is not possible.
        """
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._folder = folder
        self._generation = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="unicron-copies", daemon=True).start()

    def close(self) -> None:
        """Stop listening; connections end with their senders."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="unicron-copies", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            _keep_alive(connection)
            if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), self.token):
                return
            kept: dict[str, mmap.mmap] = {}
            while True:
                length, size = _ITEM.unpack(_receive(connection, _ITEM.size))
                name = _receive(connection, length).decode()
                if not copies.is_name(name) or size < copies.HEADER_BYTES:
                    raise ValueError(name)
                self._keep(connection, name, size, kept)
                connection.sendall(STORED)

    def _keep(self, connection: socket.socket, name: str, size: int, kept: dict[str, mmap.mmap]) -> None:
        # Mapped once for both slots: the faults of new pages would cost more than the copy.
        if name not in kept or len(kept[name]) != size:
            kept[name] = copies.allocate(self._folder / name, size)
        mapping = kept[name]
        copies.tear(mapping)
        header = _receive(connection, copies.HEADER_BYTES)
        with memoryview(mapping)[copies.HEADER_BYTES :] as rest:
            _receive_into(connection, rest)
        mapping[: copies.HEADER_BYTES] = header


def _keep_alive(connection: socket.socket) -> None:
    """Let a connection end whose sender's machine is gone without a word; its thread keeps a copy's memory mapped."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    with memoryview(data) as view:
        _receive_into(connection, view)
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer; the interpreter's lock is given up once, not for every packet.

    Raises:
        EOFError: the sender is gone.
    """
    at = 0
    while at < len(view):
        received = connection.recv_into(view[at:], 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError
        at += received


class Sender:
    """The connection to the peer that keeps this rank's copies."""

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        """Connect.

        Raises:
            OSError: the peer cannot be reached.
        """
        self._connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(token)

    def send(self, name: str, content: memoryview) -> None:
        """Send a copy under its file's name and wait until it is kept.

        Raises:
            OSError: the peer is gone, has no room, or ``close`` was called meanwhile.
        """
        self._connection.sendall(_ITEM.pack(len(name), len(content)) + name.encode())
        # Not sendfile: page by page it costs twice the processor time of one copy.
        self._connection.sendall(content)
        if self._connection.recv(1) != STORED:
            raise ConnectionError("the peer does not keep the copy")

    def close(self) -> None:
        """Close, and fail a ``send`` under way in another thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
