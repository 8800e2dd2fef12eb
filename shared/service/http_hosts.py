"""Names under which an HTTP server of this machine is known: a request for another is refused.

A web page that a user of this machine opens can have a name of its own resolve to this machine (DNS rebinding), and
would then read what a server here answers. Its requests name that host.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit


class KnownHosts:
    """This machine's names: its host name, ``localhost``, every address, and what is given.

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
    """Return the name or address in a ``Host`` header, in lower case; empty: it has none."""
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
