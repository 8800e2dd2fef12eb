"""How the ranks of a communicator meet before they have one: as those of NCCL do, over sockets of their own.

Rank 0 has a root: a thread that listens. Every rank tells the root where it listens itself, hangs up, and waits for the
root to connect to it, which the root does once all have come (nccl: src/bootstrap.cc, ``bootstrapInit``,
``bootstrapRoot``). Then all go on or none does, but for a moment in which few things happen.

So while a peer is missing a rank has no connected socket for this, only one that listens. A connection that does not
begin with the right number is dropped, and the wait goes on (src/misc/socket.cc, ``socketFinalizeAccept``). Nothing but
the shutting of the listening socket ends it: ``accept`` then fails with EINVAL (src/os/linux.cc,
``ncclOsSocketTryAccept``).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading

import torch.distributed as dist

ADDRESS = "127.0.0.1"
"""All ranks of a test are on one machine."""

_INTRODUCTION = struct.Struct("=QHH")
"""The number that all ranks know, and the rank's own number and port."""
_NUMBER = struct.Struct("=Q")
_READY = b"1"


def meet(store: dist.Store, rank: int, size: int) -> int:
    """Return a number that no other ranks have, once all ranks are here.

    Raises:
        RuntimeError: the store does not have the root's address in time (torch: ``broadcastUniqueNCCLID``).
        OSError: a socket was shut, or nobody listens at the root's address.
    """
    number = secrets.randbits(64)
    if size == 1:
        return number
    if rank == 0:
        root = socket.create_server((ADDRESS, 0), backlog=size)
        threading.Thread(target=_root, args=(root, number, size), name="contract root", daemon=True).start()
        store.set("0", f"{root.getsockname()[1]} {number}")
    port, number = map(int, store.get("0").split())
    with socket.create_server((ADDRESS, 0)) as listener:
        with socket.create_connection((ADDRESS, port)) as connection:
            connection.sendall(_INTRODUCTION.pack(number, rank, listener.getsockname()[1]))
        while not _is_let_in(listener, number):
            pass
    return number


def _is_let_in(listener: socket.socket, number: int) -> bool:
    """Accept a connection; return whether it is the root's, once the root says that all are there.

    Raises:
        OSError: the listening socket was shut, or the root has hung up.
    """
    connection, _ = listener.accept()
    with connection:
        try:
            is_root = _receive(connection, _NUMBER.size) == _NUMBER.pack(number)
        except ConnectionError:
            return False
        if is_root:
            connection.sendall(_READY)
            if _receive(connection, 1) != _READY:
                raise ConnectionAbortedError("the root has hung up")
        return is_root


def _root(listener: socket.socket, number: int, size: int) -> None:
    """Hear all ranks, and then tell each that all have come; end early where a socket is shut."""
    ports: dict[int, int] = {}
    with listener, contextlib.suppress(OSError), contextlib.ExitStack() as connections:
        while len(ports) < size:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                introduction = _receive(connection, _INTRODUCTION.size)
                if len(introduction) == _INTRODUCTION.size:
                    given, rank, port = _INTRODUCTION.unpack(introduction)
                    if given == number:
                        ports[rank] = port
        ranks = [connections.enter_context(socket.create_connection((ADDRESS, port))) for port in ports.values()]
        for one in ranks:
            one.sendall(_NUMBER.pack(number))
        if all(_receive(one, 1) == _READY for one in ranks):
            for one in ranks:
                one.sendall(_READY)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receive as many bytes; fewer if the other end hangs up."""
    received = b""
    while len(received) < size and (part := connection.recv(size - len(received))):
        received += part
    return received
