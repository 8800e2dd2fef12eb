"""The network stack of this machine: what shares loopback addresses, and the link to other machines."""

from __future__ import annotations

import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def network_stack() -> str:
    """Return what identifies this machine's network stack: the boot of its kernel, and the network namespace."""
    try:
        return f"{BOOT_ID.read_text().strip()}/{NETWORK_NAMESPACE.stat().st_ino}"
    except OSError:
        return socket.gethostname()
