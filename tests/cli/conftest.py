from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.main import main
from shared.bus.connection import Bus
from shared.log.journal import Journal
from shared.settings.model import Settings
from tests.api.kit import Server, Story, serving
from tests.api.node_machines import NodeMachines, node_machines


@dataclass(frozen=True)
class Outcome:
    """What a run of the command gave."""

    code: int
    out: str
    err: str


NOWHERE = "http://127.0.0.1:9"
"""An address at which no server listens."""

Unicron = Callable[..., Awaitable[Outcome]]


async def start_unicron(*arguments: str, server: str | None = None) -> asyncio.subprocess.Process:
    """Start the command as a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "UNICRON_SERVER"}
    if server is not None:
        environment["UNICRON_SERVER"] = server
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cli.main",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )


async def end(process: asyncio.subprocess.Process, stdin: str = "") -> Outcome:
    """Wait for a command's end."""
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 50)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


async def run_unicron(*arguments: str, server: str | None = None, stdin: str = "") -> Outcome:
    """Run the command as a process of its own."""
    return await end(await start_unicron(*arguments, server=server), stdin)


async def call_unicron(*arguments: str, server: str) -> Outcome:
    """Run the command in a thread of this process: no start of an interpreter; one at a time."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = await asyncio.to_thread(main, [*arguments, "--server", server])
    return Outcome(code, out.getvalue(), err.getvalue())


@pytest.fixture
async def api(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over an empty log."""
    async with serving(settings, bus, journal) as server:
        yield server


@pytest.fixture
def unicron(api: Server) -> Unicron:
    """Run the real command against the gateway."""

    async def run(*arguments: str) -> Outcome:
        return await call_unicron(*arguments, server=api.url)

    return run


@pytest.fixture
def machines(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeMachines]:
    """Node machines with run directories of their own; none serves yet."""
    with node_machines(bus, tmp_path / "machines", monkeypatch) as made:
        yield made


@pytest.fixture
async def healed(settings: Settings, bus: Bus, journal: Journal) -> AsyncIterator[Server]:
    """The gateway over the story of a process that was lost and restarted."""
    story = Story(settings.run_dir / "log.db")
    story.running().process_exit().process_restored()
    story.log.close()
    async with serving(settings, bus, journal) as server:
        yield server
