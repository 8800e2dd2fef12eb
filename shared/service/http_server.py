"""An HTTP server in the event loop of a service: uvicorn on a socket of ours; the names under which it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

import uvicorn

from shared.errors import Unavailable

BACKLOG = 256
"""Connections that the kernel keeps for the server until it accepts them."""


class HttpServer(uvicorn.Server):
    """Uvicorn with an event that is set once it listens; signals stay with the service."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and set ``listens``."""
        await super().startup(sockets=sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def check_free(host: str, port: int) -> None:
    """Check that ``listen`` would succeed now, for a program that starts much before a server listens.

    Raises:
        Unavailable: the address is in use, or is none of this machine.
    """
    listen(host, port).close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Its connections send each part of an answer at once.

    asyncio asks for that (TCP_NODELAY) only where a socket names its protocol, which those of ``create_server`` do not.
    An answer's body then waited for the client to acknowledge its head, 40 ms on Linux.

    Raises:
        Unavailable: the address is in use, or is none of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as err:
        raise Unavailable(f"cannot listen on {host}:{port}: {err.strerror or err}") from err
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections that the socket accepts inherit this
    return listening


class KnownHosts:
    """This machine's names: its host name, ``localhost``, every address, and the given names.

    A page on another site cannot have an address for its own name.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        own = {"localhost", socket.gethostname(), socket.getfqdn()}
        self.names = {name.lower() for name in (*own, *more)}

    def includes(self, header: str) -> bool:
        """Return whether a ``Host`` header names this machine."""
        name = _hostname(header)
        return name in self.names or _is_address(name)


def _hostname(header: str) -> str:
    """Return the name or address in a ``Host`` header, in lower case; empty if it has none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:  # brackets that do not match
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
