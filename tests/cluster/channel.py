"""JSON messages, each with file descriptors if need be, between the test process and the bed's helper processes.

A channel is a pair of connected Unix sockets of the kind SOCK_SEQPACKET: the kernel keeps message boundaries, and the
end of either process is the end of file for the other.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 1 << 16
"""The largest message starts a process: its environment has a few KiB."""

MAX_FDS = 1
"""One message brings at most one file descriptor: of a machine's network device."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message; the receiver gets copies of the descriptors.

    Raises:
        OSError: the other process has ended.
    """
    data = json.dumps(message).encode()
    assert len(data) <= MAX_MESSAGE_BYTES, f"{len(data)} bytes"
    socket.send_fds(channel, [data], fds)


def receive(channel: socket.socket) -> tuple[Message, list[int]]:
    """Return the next message and its descriptors.

    Raises:
        EOFError: the other process has ended.
        TimeoutError: the channel has a time-out, and nothing came within it.
    """
    try:
        data, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_FDS)
    except ConnectionResetError:
        data, fds = b"", []
    if not data:
        raise EOFError("the other process has ended")
    message: Message = json.loads(data)
    return message, fds
