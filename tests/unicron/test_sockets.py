"""What is done to the sockets of this process while another thread waits at them."""

from __future__ import annotations

import select
import socket
from uuid import uuid4

import pytest

from unicron.process import sockets

LIMIT_MS = 5_000


def wakes(one: socket.socket) -> bool:
    """Return whether a thread that polls the socket would be awake."""
    poll = select.poll()
    poll.register(one, select.POLLIN)
    return bool(poll.poll(LIMIT_MS))


def test_a_knock_wakes_who_polls_a_listening_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sockets.knock()
        assert wakes(server)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b"", "it hangs up and has said nothing"


def test_a_knock_wakes_who_polls_a_socket_of_nccl_and_no_other() -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as of_nccl,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        of_nccl.bind(b"\0" + sockets.NCCL_SOCKET + uuid4().hex.encode())
        other.bind(b"\0" + uuid4().hex.encode())
        sockets.knock()
        assert wakes(of_nccl)
        assert of_nccl.recv(1) == b""
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_a_thread_that_waits_for_a_connection_gets_an_error_once_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen, socket.create_server(("127.0.0.1", 0)) as other:
        before = sockets.listening()
        with socket.create_server(("127.0.0.1", 0)) as later:
            sockets.stop_listening(lambda inode: inode not in before)
            with pytest.raises(OSError, match="Invalid argument"):
                later.accept()
        for server in (chosen, other):
            socket.create_connection(server.getsockname()).close()
            server.accept()[0].close()
