"""Which user of this machine is at the other end of a TCP connection over loopback.

The kernel lists every TCP socket with the uid of its owner in ``/proc/net/tcp`` and ``tcp6`` (proc_pid_net(5)). The
client's socket is the one whose two addresses are those of the connection, the other way round.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

_BYTE_ORDER = sys.byteorder

_ESTABLISHED = "01"
"""State of a socket (``include/net/tcp_states.h``). In others, a socket that its owner has closed has uid 0."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class End(NamedTuple):
    """One end of a connection."""

    address: Address
    port: int


def uid_of(peer: End, own: End, tables: tuple[Path, ...] = TABLES) -> int | None:
    """Return the uid that owns the socket of a connection's peer.

    Args:
        peer: the client's end.
        own: this process's end.
        tables: files of the kernel's form.

    Returns:
        The uid; None if the peer is not on this machine, or has closed its end.
    """
    if not (peer.address.is_loopback and own.address.is_loopback):
        return None
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        for local, remote, uid in _established(lines):
            if local == peer and remote == own:
                return uid
    return None


def end(host: str, port: int) -> End | None:
    """Return one end of a connection as the server knows it; None if it is no address."""
    try:
        return End(_plain(ipaddress.ip_address(host.partition("%")[0])), port)
    except ValueError:
        return None


def _established(lines: list[str]) -> Iterator[tuple[End, End, int]]:
    """Yield local end, remote end and uid of each socket that is connected."""
    for line in lines:
        fields = line.split()
        if len(fields) > 7 and fields[3] == _ESTABLISHED:
            yield _parse(fields[1]), _parse(fields[2]), int(fields[7])


def _parse(text: str) -> End:
    """Return an end from the kernel's form: the address in words of 32 bits, each in the machine's byte order."""
    words, port = text.split(":")
    data = b"".join(int(words[at : at + 8], 16).to_bytes(4, _BYTE_ORDER) for at in range(0, len(words), 8))
    return End(_plain(ipaddress.ip_address(data)), int(port, 16))


def _plain(address: Address) -> Address:
    """Return an IPv4 address that is written as an IPv6 address as what it is."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
