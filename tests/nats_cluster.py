"""Three nats-servers with the configuration of deploy/kubernetes/overlays/production, on loopback ports."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import yaml

from shared import credentials
from shared.credentials import Credential
from shared.key_directory import KeyDirectory
from shared.nats_server import find_binary
from shared.parent import die_with_parent

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
PRODUCTION = DEPLOY / "kubernetes" / "overlays" / "production"
SERVERS = 3

PASSWORD = "12e4-of-the-test"
"""Of the routes. NATS would take one that begins like this, without quotes, for a number."""

HEALTHY_S = 60.0
"""For three servers to elect who leads JetStream: seconds, and more on a busy machine."""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has at present."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


class NatsCluster:
    """The servers; an async context manager that starts and stops them.

    Args:
        directory: for configurations, stores and output.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._clients, self._routes, self._health = (free_ports(SERVERS) for _ in range(3))
        self._keys = KeyDirectory(directory / "keys")
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def urls(self) -> str:
        """Where the servers are, as a setting has it."""
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._clients)

    @property
    def credential(self) -> Credential:
        """The detector's."""
        return credentials.read(self._keys.credential_file("detector"))

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
        self._processes[int(name.removeprefix("nats-"))].kill()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        folder = self._directory / f"nats-{index}"
        folder.mkdir()
        (folder / "keys").symlink_to(self._keys.path)
        changes = {
            '"0.0.0.0:4222"': f'"127.0.0.1:{self._clients[index]}"',
            '"0.0.0.0:8222"': f'"127.0.0.1:{self._health[index]}"',
            '"0.0.0.0:6222"': f'"127.0.0.1:{self._routes[index]}"',
            '"/data"': f'"{folder / "data"}"',
        }
        for file in (DEPLOY / "nats/nats.conf", PRODUCTION / "cluster.conf"):
            text = file.read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            (folder / file.name).write_text(text)
        routes = {f"nats-{peer}.nats-peers:6222": f"127.0.0.1:{port}" for peer, port in enumerate(self._routes)}
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
        async with asyncio.timeout(HEALTHY_S), httpx.AsyncClient() as http:
            waiting = list(self._health)
            while waiting:
                assert all(one.poll() is None for one in self._processes), f"a server has ended: {self._directory}"
                waiting = [port for port in waiting if not await _is_healthy(http, port)]
                await asyncio.sleep(0.05)

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


async def _is_healthy(http: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await http.get(f"http://127.0.0.1:{port}/healthz")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
