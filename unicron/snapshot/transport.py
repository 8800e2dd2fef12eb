"""The transport of snapshots to a partner's shared memory: a TCP connection from the owner of a snapshot.

``Receiver`` runs in the partner (``unicron.snapshot.partners``), in threads of its own, and writes the snapshots into
the folder of its node. ``Sender`` runs in the owner. Both know a token that the ranks exchange in their process group.
A snapshot is sent as the bytes of its file; the receiver writes the header last, which makes the snapshot whole.

    owner -> partner   token; then for each snapshot: length of name (1 byte), size (8 bytes), name, content
    partner -> owner   1 byte for each snapshot: stored, or not since the partner's folder is gone
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

from unicron.snapshot import files

_ITEM = struct.Struct("<BQ")
TOKEN_BYTES = 16
CONNECT_TIMEOUT_S = 5.0
"""Longest time for a connect. Chosen: the partner listens already, so only lost packets can delay the connect."""

SILENT_S, PROBE_S, PROBES = 60, 10, 3
"""TCP keep-alive of a receiver's connections: seconds of silence before the first probe, seconds between probes, probes
without an answer before the connection ends. Chosen: nothing waits for it, as a lost rank's generation ends before."""

STORED, NO_FOLDER = b"1", b"0"

_DISCARDED_BYTES = 1 << 20
"""Number of bytes of a snapshot that cannot be stored that are read at a time."""


class Receiver:
    """Stores the snapshots that peers send in a folder."""

    def __init__(self, host: str, folder: Path) -> None:
        """Listen on a free port, and start the thread that accepts connections.

        Args:
            host: the address to listen on.
            folder: where the snapshots are stored.

        Raises:
            OSError: there is no such address or no free port.
        """
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._folder = folder
        self.generation = 0
        """The present generation: files of older ones may be deleted."""
        self._lock = threading.Lock()
        self._stored: dict[str, tuple[int, int, int] | None] = {}
        """File name -> what was stored under it for the connections that are open."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="unicron-receiver", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether a file that was stored for a peer that is still connected is gone from the folder."""
        with self._lock:
            stored = list(self._stored.items())
        present = [(name, file) for name, file in stored if files.generation_of(name) >= self.generation]
        return any(file is None or files.file_at(self._folder / name) != file for name, file in present)

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
            threading.Thread(target=self._serve, args=(connection,), name="unicron-receiver", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            _keep_alive(connection)
            if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), self.token):
                return
            mappings: dict[str, mmap.mmap] = {}
            try:
                while True:
                    length, size = _ITEM.unpack(_receive(connection, _ITEM.size))
                    name = _receive(connection, length).decode()
                    if not files.is_name(name) or size < files.HEADER_BYTES:
                        raise ValueError(name)
                    connection.sendall(STORED if self._store(connection, name, size, mappings) else NO_FOLDER)
            finally:
                with self._lock:
                    for name in mappings:
                        self._stored.pop(name, None)

    def _store(self, connection: socket.socket, name: str, size: int, mappings: dict[str, mmap.mmap]) -> bool:
        """Store a snapshot that follows; return False if the folder is gone, which the agent makes anew."""
        path = self._folder / name
        # Each slot is mapped once: the page faults of a new mapping would take longer than copying the data.
        known = name in mappings and len(mappings[name]) == size and files.file_at(path) == self._stored.get(name)
        if not known:
            try:
                mappings[name] = files.allocate(path, size)
            except FileNotFoundError:
                _discard(connection, size)
                return False
            with self._lock:
                self._stored[name] = files.file_at(path)
        mapping = mappings[name]
        files.tear(mapping)
        header = _receive(connection, files.HEADER_BYTES)
        with memoryview(mapping)[files.HEADER_BYTES :] as rest:
            _receive_into(connection, rest)
        mapping[: files.HEADER_BYTES] = header
        return True


def _discard(connection: socket.socket, size: int) -> None:
    """Read a snapshot that cannot be stored, so that the connection stays usable."""
    buffer = memoryview(bytearray(min(size, _DISCARDED_BYTES)))
    while size > 0:
        part = buffer[: min(size, len(buffer))]
        _receive_into(connection, part)
        size -= len(part)


def _keep_alive(connection: socket.socket) -> None:
    """Make the connection end if the sender's machine is lost; the thread of the connection keeps a snapshot mapped."""
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
    """Fill a buffer; the interpreter's lock is released once, not for every packet.

    Raises:
        EOFError: the sender has closed the connection.
    """
    filled = 0
    while filled < len(view):
        received = connection.recv_into(view[filled:], 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError
        filled += received


class Sender:
    """The connection to the partner that stores this rank's snapshots."""

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        """Connect.

        Args:
            address: host and port of the partner's receiver.
            token: the receiver's.

        Raises:
            OSError: the partner cannot be reached.
        """
        self._connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(token)

    def send(self, name: str, content: memoryview) -> bool:
        """Send a snapshot and wait until it is stored; return False if the partner's folder is gone.

        Args:
            name: the name of the snapshot's file.
            content: the file's content.

        Raises:
            OSError: the partner was lost or has no room, or ``close`` was called meanwhile.
        """
        self._connection.sendall(_ITEM.pack(len(name), len(content)) + name.encode())
        # sendfile is not used: it works page by page and takes twice the processor time.
        self._connection.sendall(content)
        answer = self._connection.recv(1)
        if answer not in (STORED, NO_FOLDER):
            raise ConnectionError("the partner does not store the snapshot")
        return answer == STORED

    def close(self) -> None:
        """Close the connection; a ``send`` under way in another thread fails."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
