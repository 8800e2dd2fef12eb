"""Node machines of the api's tests: their run directories, and the part of the agent that serves files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.agent.files import task_inputs
from services.agent.files.file_server import FileServer
from services.agent.files.rank_users import RankUsers
from services.agent.files.task_secrets import TaskSecrets
from services.api.output import node_files
from services.api.submission import submitted_inputs
from shared.bus.connection import Bus
from shared.errors import Unavailable
from shared.messages.node_files import FILES, FilesAnswer, FilesRequest, failed


class NodeMachines:
    """Node machines with a run directory each, and on each the part of the agent that serves files.

    ``away``: nodes that serve nothing while they are in it.
    """

    def __init__(self, bus: Bus, folder: Path) -> None:
        self._bus, self._folder = bus, folder
        self._servers: list[FileServer] = []
        self.away: set[str] = set()

    def run_dir(self, node: str) -> Path:
        """Return the run directory of a node."""
        return self._folder / node

    async def start(self, *nodes: str, run_dir: Path | None = None) -> None:
        """Begin to serve the files of nodes; ``run_dir``: the one that they share."""
        for node in nodes:
            await self._start(node, run_dir or self.run_dir(node))

    async def _start(self, node: str, run_dir: Path) -> None:
        server = FileServer(self._bus, node, run_dir, RankUsers(""), TaskSecrets())
        self._servers.append(server)

        async def serve(request: FilesRequest) -> FilesAnswer:
            return failed(Unavailable("away")) if node in self.away else await server.serve(request)

        await self._bus.serve(FILES, serve, node, refuse=failed)

    def stop(self) -> None:
        """End the threads of all."""
        for server in self._servers:
            server.stop()


@contextmanager
def node_machines(bus: Bus, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeMachines]:
    """Give node machines, none of which serves yet. The api waits for them however busy the test's machine is."""
    monkeypatch.setattr(node_files, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(submitted_inputs, "CHECK_TIMEOUT_S", 20.0)
    monkeypatch.setattr(task_inputs, "COMPILE_TIMEOUT_S", 20.0)
    made = NodeMachines(bus, folder)
    try:
        yield made
    finally:
        made.stop()


def write_output(run_dir: Path, task: str, name: str, text: str | bytes) -> Path:
    """Write what a process printed."""
    path = run_dir / "tasks" / task / "output" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
