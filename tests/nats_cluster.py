"""Three nats-servers with the configuration of deploy/kubernetes/overlays/production, on loopback ports."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import yaml

from shared.bus import credentials
from shared.bus.credentials import Credential
from shared.machine.process import die_with_parent
from shared.nats.key_directory import KeyDirectory
from shared.nats.nats_server import find_binary
from tests.condition import until

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
PRODUCTION = DEPLOY / "kubernetes" / "overlays" / "production"
SERVERS = 3

PASSWORD = "12e4-of-the-test"
"""Of the routes. NATS would take one that begins like this, without quotes, for a number."""

FIRST_CLIENT, FIRST_ROUTE, FIRST_HEALTH = 20_422, 20_622, 20_822
"""Ports of the first server, on an address of its own. They are below those that a kernel gives away: one that was free
a moment ago may be any process's that listens on all addresses (seen on a busy machine)."""

HEALTHY_S = 60.0
"""For three servers to elect who leads JetStream: seconds, and more on a busy machine."""


def own_address() -> str:
    """Return a loopback address that no other process uses."""
    number = os.getpid()
    return f"127.{number >> 16 & 0xFF | 0x80}.{number >> 8 & 0xFF}.{number & 0xFF}"


class NatsCluster:
    """The servers; an async context manager that starts and stops them.

    Args:
        directory: for configurations, stores and output.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._address = own_address()
        self._clients, self._routes, self._health = (
            [first + index for index in range(SERVERS)] for first in (FIRST_CLIENT, FIRST_ROUTE, FIRST_HEALTH)
        )
        self._keys = KeyDirectory(directory / "keys")
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def urls(self) -> str:
        """Where the servers are, as a setting has it."""
        return ",".join(f"nats://{self._address}:{port}" for port in self._clients)

    @property
    def credential(self) -> Credential:
        """The detector's."""
        return credentials.read(self.credential_file("detector"))

    def credential_file(self, identity: str) -> Path:
        """The file of a service's credential."""
        return self._keys.credential_file(identity)

    async def __aenter__(self) -> Self:
        self._keys.make()
        try:
            for index in range(SERVERS):
                self._processes.append(self._start(index))
            await self._healthy()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def kill(self, name: str) -> None:
        """Kill a server, by its name: nats-0, ..."""
        self.send_signal(name, signal.SIGKILL)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a server, by its name; one that is stopped is as if cut off from all."""
        self._processes[int(name.removeprefix("nats-"))].send_signal(number)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        folder = self._directory / f"nats-{index}"
        folder.mkdir()
        (folder / "keys").symlink_to(self._keys.path)
        changes = {
            '"0.0.0.0:4222"': f'"{self._address}:{self._clients[index]}"',
            '"0.0.0.0:8222"': f'"{self._address}:{self._health[index]}"',
            '"0.0.0.0:6222"': f'"{self._address}:{self._routes[index]}"',
            '"/data"': f'"{folder / "data"}"',
        }
        for file in (DEPLOY / "nats/nats.conf", PRODUCTION / "cluster.conf"):
            text = file.read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            (folder / file.name).write_text(text)
        routes = {f"nats-{peer}.nats-peers:6222": f"{self._address}:{port}" for peer, port in enumerate(self._routes)}
        parent = os.getpid()
        with open(folder / "output", "wb") as output:
            return subprocess.Popen(
                [find_binary(), "--config", folder / "cluster.conf"],
                env={**os.environ, **_variables(f"nats-{index}", routes)},
                stdout=output,
                stderr=output,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
            )

    async def _healthy(self) -> None:
        async with httpx.AsyncClient() as http:

            async def are_healthy() -> bool:
                ended = [index for index, one in enumerate(self._processes) if one.poll() is not None]
                assert not ended, "\n".join((self._directory / f"nats-{one}/output").read_text() for one in ended)
                return all([await _is_healthy(http, f"{self._address}:{port}") for port in self._health])

            await until(are_healthy, limit_s=HEALTHY_S)

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _variables(name: str, changes: dict[str, str]) -> dict[str, str]:
    """Return the environment of a server as the overlay has it, with its routes elsewhere."""
    patch = yaml.safe_load((PRODUCTION / "nats.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    found = {"POD_NAME": name, "ROUTE_PASSWORD": PASSWORD}
    for entry in container["env"]:
        if "value" in entry:
            text = entry["value"].replace("$(ROUTE_PASSWORD)", PASSWORD)
            for old, new in changes.items():
                text = text.replace(old, new)
            found[entry["name"]] = text
    return found


async def _is_healthy(http: httpx.AsyncClient, address: str) -> bool:
    try:
        return (await http.get(f"http://{address}/healthz")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
