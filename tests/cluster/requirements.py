"""What the bed needs of the host it runs on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.wall_clock import find_library
from tests.postgres import find_binaries

REQUIRE = "UNICRON_REQUIRE_CLUSTER"
"""Environment variable: with the value 1, a host on which the bed cannot run is a failure."""


def missing() -> str:
    """Return what the host lacks; empty if the bed can run."""
    if not sys.platform.startswith("linux"):
        return "namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make namespaces and devices"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if find_binaries() is None:
        return "no PostgreSQL is installed"
    if find_library() is None:
        return "no libfaketime is installed"
    attempt = [sys.executable, "-c", _ATTEMPT]
    result = subprocess.run(attempt, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode != 0:
        return f"no namespace with a TAP device can be made: {result.stderr.strip().splitlines()[-1]}"
    return ""


_ATTEMPT = """
import fcntl, os, struct
from tests.cluster import holder as h
h.unshare(h.CLONE_NEWNS | h.CLONE_NEWUTS | h.CLONE_NEWIPC | h.CLONE_NEWPID | h.CLONE_NEWNET)
h.mount("none", "/", flags=h.MS_REC | h.MS_PRIVATE)
device = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(device, h.TUNSETIFF, struct.pack("16sH22x", b"eth0", h.IFF_TAP | h.IFF_NO_PI))
"""
