"""The TCP sockets of this process, and shutting some of them while another thread blocks on them.

``unicron.link.breaker`` uses them. In gloo neither ``abort`` nor ``destroy_process_group`` unblocks a thread; shutting
gloo's sockets down does, within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator

NCCL_SOCKET = b"nccl-socket-"
"""The beginning of the names of NCCL's Unix sockets, behind the byte 0 of names outside of the file system (NCCL's
``ipcsocket.cc``)."""

CONNECT_TIMEOUT_S = 0.2
"""Time-out for connecting to a listening socket of this same process, not over a network."""


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and duplicate of each socket of this process.

    The duplicate keeps the inode in use, so no other socket can get the same one meanwhile.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = os.dup(int(name))
        except OSError:
            continue  # the socket was closed since the folder was read
        with contextlib.closing(socket.socket(fileno=duplicate)) as one:
            yield os.fstat(duplicate).st_ino, one


def _tcp_sockets(*, listening: bool) -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and duplicate of each TCP socket of this process that listens, or of each that does not."""
    for inode, one in _sockets():
        if one.family in (socket.AF_INET, socket.AF_INET6):
            if bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
                yield inode, one


def connected() -> frozenset[int]:
    """Return the inodes of this process's TCP sockets that are not listening."""
    return frozenset(inode for inode, _ in _tcp_sockets(listening=False))


def listening() -> frozenset[int]:
    """Return the inodes of this process's listening TCP sockets."""
    return frozenset(inode for inode, _ in _tcp_sockets(listening=True))


def impersonate_peers(chosen: Callable[[int], bool], peers: int) -> None:
    """Connect to listening sockets in place of gloo peers that will not come, and hang up.

    One of two gloo peers waits for the connection of the other, up to five times its time-out (gloo's
    ``Pair::waitUntilConnected``), without a socket that could be shut. The connecting peer sends the number of the pair
    that it connects, 8 bytes that count from 0 on each listener. The numbers in use are not known here, so all possible
    ones are tried. The waiting thread then has a connection that ends, which is an error like any other.

    Args:
        chosen: whether to connect to the listening socket of an inode.
        peers: how many numbers to try on each of them.
    """
    addresses = [connection.getsockname() for inode, connection in _tcp_sockets(listening=True) if chosen(inode)]
    for address in addresses:
        for number in range(peers):
            with contextlib.suppress(OSError), socket.create_connection(address[:2], CONNECT_TIMEOUT_S) as connection:
                connection.sendall(struct.pack("=q", number))


def knock() -> None:
    """Wake the threads of NCCL that serve communicators: they poll their sockets for half a second at a time.

    Such a thread looks whether its communicator was aborted only between two polls, and an abort waits for it. A
    connection that hangs up, and an empty datagram, end the poll and mean nothing to the thread.
    """
    for address in [connection.getsockname() for _, connection in _tcp_sockets(listening=True)]:
        with contextlib.suppress(OSError), socket.create_connection(address[:2], CONNECT_TIMEOUT_S):
            pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for name in _nccl_datagram_sockets():
            with contextlib.suppress(OSError):
                sender.sendto(b"", socket.MSG_DONTWAIT, name)


def _nccl_datagram_sockets() -> list[bytes]:
    """Return the addresses of this process's Unix sockets over which NCCL's ranks hand each other descriptors."""
    found = []
    for _, one in _sockets():
        if (one.family, one.type) == (socket.AF_UNIX, socket.SOCK_DGRAM):
            address = one.getsockname()  # the address is bytes if it is not in the file system
            if isinstance(address, bytes) and NCCL_SOCKET in address:
                found.append(address)
    return found


def stop_listening(chosen: Callable[[int], bool]) -> None:
    """Shut down the listening sockets whose inode is chosen: a thread that waits for a connection gets an error."""
    for inode, listener in _tcp_sockets(listening=True):
        if chosen(inode):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def shut(chosen: Callable[[int], bool]) -> int:
    """Shut down both directions of the connected TCP sockets whose inode is chosen; return how many were shut."""
    count = 0
    for inode, connection in _tcp_sockets(listening=False):
        if chosen(inode):
            with contextlib.suppress(OSError):  # the socket is not connected yet, or already broken
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
