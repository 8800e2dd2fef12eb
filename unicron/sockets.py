"""The TCP sockets of this process, and breaking some of them under a thread that blocks on them.

``abort`` and ``destroy_process_group`` unblock nothing in gloo; shutting its sockets down does, within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator

CONNECT_TIMEOUT_S = 0.2
"""For connecting to a listening socket of this same process."""


def _tcp(*, listening: bool) -> Iterator[tuple[int, socket.socket]]:
    """Yield (inode, duplicate) of each TCP socket of this process that listens, or of each that does not."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = os.dup(int(name))
        except OSError:
            continue  # closed since the listing
        with contextlib.closing(socket.socket(fileno=duplicate)) as connection:
            try:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) != listening:
                    continue
                # The duplicate keeps the inode: a descriptor closed and used again cannot be mistaken for another.
                yield os.fstat(duplicate).st_ino, connection
            except OSError:
                continue


def connected() -> frozenset[int]:
    """Return the inodes of this process's TCP sockets that are not listening."""
    return frozenset(inode for inode, _ in _tcp(listening=False))


def listening() -> frozenset[int]:
    """Return the inodes of this process's listening TCP sockets."""
    return frozenset(inode for inode, _ in _tcp(listening=True))


def answer(chosen: Callable[[int], bool], peers: int) -> None:
    """Connect to the chosen listening sockets in place of gloo peers that will not come, and hang up.

    Of two gloo peers one waits for the other's connection, five times its time-out long (gloo's
    ``Pair::waitUntilConnected``), with no socket that could be shut. Whoever connects says which pair it is for: an
    8-byte number that counts from 0 on each listener, so all that there can be are tried. What the waiting thread
    gets is a connection that ends, which is an error like any other.
    """
    addresses = [connection.getsockname() for inode, connection in _tcp(listening=True) if chosen(inode)]
    for address in addresses:
        for number in range(peers):
            with contextlib.suppress(OSError), socket.create_connection(address[:2], CONNECT_TIMEOUT_S) as connection:
                connection.sendall(struct.pack("=q", number))


def shut(chosen: Callable[[int], bool]) -> int:
    """Shut down both directions of the TCP sockets whose inode is chosen; return how many were."""
    count = 0
    for inode, connection in _tcp(listening=False):
        if chosen(inode):
            with contextlib.suppress(OSError):  # not connected yet, or already broken
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
