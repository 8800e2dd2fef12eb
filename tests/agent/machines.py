"""Machines for tests of addresses: network namespaces on one bridge, each with a host name and a hosts file of its own.

The test's own thread moves into a namespace of its own first, so nothing of the machine's network is touched, and what
the test starts afterwards (nats-server, the detector) is on the hub of the bridge.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.nats_server import OpenServer

if TYPE_CHECKING:
    from pyroute2 import IPRoute  # the whole of it takes a third of a second, in every process that collects tests

CLONE_NEWNET = 0x40000000
HUB = "198.51.100.1"
"""Address of the hub. 198.51.100.0/24 is for documentation (RFC 5737): no real host is ever meant."""

MACHINES = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """The hub, which the test is on, and two machines beside it."""

    def __init__(self) -> None:
        from pyroute2 import IPRoute

        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._namespaces = [self._unshare() for _ in range(MACHINES)]
        self._hub = self._unshare()
        with IPRoute() as routes:
            _up(routes, "lo")
            routes.link("add", ifname="hub0", kind="bridge")
            _up(routes, "hub0", HUB)
            for number, namespace in enumerate(self._namespaces):
                routes.link("add", ifname=f"m{number}", kind="veth", peer={"ifname": "net0"})
                routes.link("set", index=_index(routes, "net0"), net_ns_fd=namespace)
                routes.link("set", index=_index(routes, f"m{number}"), master=_index(routes, "hub0"), state="up")
        for number, namespace in enumerate(self._namespaces):
            _enter(namespace)
            with IPRoute() as routes:
                _up(routes, "lo")
                _up(routes, "net0", self.address(number))
        _enter(self._hub)

    @staticmethod
    def address(number: int) -> str:
        """Return the address of a machine."""
        return f"198.51.100.{11 + number}"

    def command(self, number: int, host_name: str, hosts: Path) -> list[str]:
        """Return the beginning of a command line that runs on a machine, with this host name and hosts file."""
        namespace = f"/proc/{os.getpid()}/fd/{self._namespaces[number]}"
        script = 'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", script, host_name, str(hosts)]
        return ["nsenter", f"--net={namespace}", *inside]

    def close(self) -> None:
        """Return to the machine's own network; the namespaces end with their last process."""
        _enter(self._home)
        for descriptor in [self._home, self._hub, *self._namespaces]:
            os.close(descriptor)

    def _unshare(self) -> int:
        if _libc.unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


class OpenNats(OpenServer):
    """A server that other machines reach."""

    @property
    def url(self) -> str:
        return f"nats://{HUB}:{self.port}"

    @property
    def local_url(self) -> str:
        """The address for clients on the hub that use its loopback interface."""
        return f"nats://127.0.0.1:{self.port}"

    def _write_config(self) -> Path:
        path = super()._write_config()
        path.write_text(path.read_text().replace('listen: "127.0.0.1:', 'listen: "0.0.0.0:'))
        return path


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """The network for one test.

    The test is skipped where namespaces cannot be made; with ``UNICRON_REQUIRE_CLUSTER=1`` it fails there.
    """
    try:
        made = Network()
    except PermissionError:
        if os.environ.get("UNICRON_REQUIRE_CLUSTER") == "1":
            raise
        pytest.skip("network namespaces need root")
    try:
        yield made
    finally:
        made.close()


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _index(routes: IPRoute, name: str) -> int:
    return int(routes.link_lookup(ifname=name)[0])


def _up(routes: IPRoute, name: str, address: str = "") -> None:
    if address:
        routes.addr("add", index=_index(routes, name), address=address, prefixlen=24)
    routes.link("set", index=_index(routes, name), state="up")
