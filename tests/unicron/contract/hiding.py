"""The sockets of gloo that the product must not see: NCCL has no such ones."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from unicron.process import sockets

_tcp_sockets = sockets._tcp_sockets
_seen: frozenset[int] | None = None
"""While sockets are hidden: inodes of those that are not."""


def install() -> None:
    """Have the product's view of this process's sockets be without those that are hidden."""
    replaced: Any = sockets
    replaced._tcp_sockets = _visible


def _visible(*, listening: bool) -> Iterator[tuple[int, socket.socket]]:
    for inode, one in _tcp_sockets(listening=listening):
        if _seen is None or inode in _seen:
            yield inode, one


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """While this lasts, hide the sockets that are opened; one thread at a time.

    When ranks are there that NCCL would connect, gloo connects them. If a socket of one of them were shut meanwhile,
    the others would wait for gloo's time-out, at places where NCCL does not.
    """
    global _seen
    _seen = frozenset(inode for listening in (False, True) for inode, _ in _tcp_sockets(listening=listening))
    try:
        yield
    finally:
        _seen = None
