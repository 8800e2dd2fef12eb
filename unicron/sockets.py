"""The TCP sockets of this process, and breaking some of them under a thread that blocks on them.

``abort`` and ``destroy_process_group`` unblock nothing in gloo; shutting its sockets down does, within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator


def _connected() -> Iterator[tuple[int, socket.socket]]:
    """Yield (inode, duplicate) of each connected TCP socket of this process; listening ones are left out."""
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
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                # The duplicate keeps the inode: a descriptor closed and used again cannot be mistaken for another.
                yield os.fstat(duplicate).st_ino, connection
            except OSError:
                continue


def connected() -> frozenset[int]:
    """Return the inodes of this process's TCP sockets that are not listening."""
    return frozenset(inode for inode, _ in _connected())


def shut(chosen: Callable[[int], bool]) -> int:
    """Shut down both directions of the TCP sockets whose inode is chosen; return how many were."""
    count = 0
    for inode, connection in _connected():
        if chosen(inode):
            with contextlib.suppress(OSError):  # not connected yet, or already broken
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
