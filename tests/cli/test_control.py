"""``unicron control``: the services against a NATS and a log that others run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from cli.stack.children import SERVICES
from cli.stack.control_plane import metrics_address
from tests.condition import until
from tests.e2e.kit import processes_of
from tests.nats_server import OpenServer
from tests.versions.test_log import joined, newer_log

pytestmark = pytest.mark.timeout(180)

START_S = 90.0
"""Four services start in a few seconds; the machine may be busy."""

POLL_S = 0.02
"""Between two looks at a process."""


@dataclass
class Running:
    """A running ``unicron control``: its process, and where its output goes."""

    process: asyncio.subprocess.Process
    lines: Path
    run_dir: Path

    async def ready(self) -> str:
        """Wait for the line that it prints; return the URL."""
        assert self.process.stdout is not None
        word, _, url = (await self.process.stdout.readline()).decode().strip().partition(" ")
        assert word == "ready", self.lines.read_text()
        return url

    async def ended(self) -> int:
        """Wait for its end; return its exit status. Nothing of it is left."""
        async with asyncio.timeout(START_S):
            code = await self.process.wait()
        assert processes_of(self.run_dir) == []
        return code

    def service(self, name: str) -> psutil.Process | None:
        """Return the process of a service, if it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if child.cmdline()[-1:] == [SERVICES[name]]:
                        return child
        return None

    async def started(self, name: str, but: int = 0) -> psutil.Process:
        """Wait for a process of a service other than one with a pid; return it."""

        def other() -> psutil.Process | None:
            found = self.service(name)
            return found if found is not None and found.pid != but else None

        found: psutil.Process = await until(other, f"{name} has a process other than {but}")
        return found


async def answered(client: httpx.AsyncClient, service: str) -> None:
    """Wait until the API answers, and says that a service works."""

    async def works() -> bool:
        with contextlib.suppress(httpx.TransportError):
            checks = (await client.get("/readyz")).json()["checks"]
            return any(check["name"] == service and check["ok"] for check in checks)
        return False

    await until(works, f"the API says that {service} works")


@contextlib.asynccontextmanager
async def control(nats: OpenServer, tmp_path: Path, *options: str, **settings: str) -> AsyncIterator[Running]:
    """Run the command until the end of the block."""
    lines, run_dir = tmp_path / "control.log", tmp_path / "run"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    environment = {
        **inherited,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "UNICRON_NATS_URL": nats.url,
        "UNICRON_NATS_KEYS": str(nats.keys.path),
        "UNICRON_PORT": "0",
        **settings,
    }
    with lines.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cli.main", "control", "--run-dir", str(run_dir), *options),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Running(process, lines, run_dir)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.e2e
async def test_it_runs_the_services_and_starts_one_again_that_ends(nats: OpenServer, tmp_path: Path) -> None:
    async with control(nats, tmp_path) as running:
        url = await running.ready()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/v1/tasks")).json()["items"] == []
            for name in ("planner", "api"):
                before = running.service(name)
                assert before is not None
                before.kill()
                async with asyncio.timeout(START_S):
                    after = await running.started(name, before.pid)
                assert after.pid != before.pid
            async with asyncio.timeout(START_S):
                await answered(client, "planner")
        assert "planner: exit code -9; it is started again in 0 s" in running.lines.read_text()
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    said = running.lines.read_text()
    ends = [line for line in said.splitlines() if line.endswith("shared.service.frame: stopped")]
    stopped = [line.split()[2].partition("[")[0] for line in ends]
    assert (sorted(stopped[:2]), stopped[2:]) == (["planner", "transition"], ["detector", "api"])


@pytest.mark.slow
async def test_a_request_to_end_while_it_starts_leaves_nothing(nats: OpenServer, tmp_path: Path) -> None:
    async with control(nats, tmp_path) as running:
        async with asyncio.timeout(START_S):
            await running.started("detector")
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0


@pytest.mark.e2e
async def test_killed_it_takes_the_services_with_it(nats: OpenServer, tmp_path: Path) -> None:
    async with control(nats, tmp_path) as running:
        await running.ready()
        services = psutil.Process(running.process.pid).children()
        assert len(services) == len(SERVICES)
        running.process.kill()
        assert psutil.wait_procs(services, timeout=START_S)[1] == []


async def test_a_credential_that_is_missing_is_refused_before_anything_starts(nats: OpenServer, tmp_path: Path) -> None:
    keys = tmp_path / "incomplete"
    keys.mkdir()
    shutil.copy(nats.keys.credential_file("detector"), keys)
    async with control(nats, tmp_path, "--keys", str(keys)) as running:
        assert await running.ended() == 2
    said = running.lines.read_text()
    assert f"credential {keys}/planner.json: No such file or directory: `unicron keys make`" in said
    assert not running.run_dir.exists()


@pytest.mark.slow
async def test_another_services_credential_is_refused(nats: OpenServer, tmp_path: Path) -> None:
    keys = tmp_path / "mixed"
    keys.mkdir()
    for name in SERVICES:
        shutil.copy(nats.keys.credential_file("detector"), keys / f"{name}.json")
    async with control(nats, tmp_path, "--keys", str(keys)) as running:
        assert await running.ended() == 2
    assert "is not the credential of planner" in running.lines.read_text()
    assert not running.run_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "status", "said"),
    [
        ({"UNICRON_COMMAND_TIMEOUT_S": "400"}, 2, "command_timeout_s: must be less than resume_timeout_s"),
        ({"UNICRON_NATS_URL": "nats://127.0.0.1:1", "UNICRON_CONNECT_TIMEOUT_S": "0.1"}, 5, "unavailable"),
        ({"UNICRON_LOG_URL": "nonsense://"}, None, "detector did not start"),
        ({"UNICRON_HOST": "0.0.0.0"}, 2, "needs UNICRON_TLS_CERTIFICATE"),
    ],
)
async def test_it_ends_with_the_status_of_a_service_that_is_refused(
    nats: OpenServer, tmp_path: Path, setting: dict[str, str], status: int | None, said: str
) -> None:
    async with control(nats, tmp_path, **setting) as running:
        code = await running.ended()
    assert code == status if status is not None else code != 0
    assert said in running.lines.read_text()


@pytest.mark.slow
async def test_a_key_that_nats_does_not_know_is_refused_at_once(nats: OpenServer, tmp_path: Path) -> None:
    stranger = OpenServer(tmp_path / "stranger")
    stranger.keys.make()
    async with control(nats, tmp_path, "--keys", str(stranger.keys.path)) as running:
        assert await running.ended() == 5
    assert "access-denied" in running.lines.read_text()


@pytest.mark.slow
async def test_a_log_of_a_newer_version_is_refused_at_once(nats: OpenServer, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    newer_log(tmp_path / "run", joined(2, type="task.dreamt"))
    async with control(nats, tmp_path) as running:
        assert await running.ended() == 4
    said = running.lines.read_text()
    assert "newer-version: position 2" in said
    assert "did not start: it ended with exit status 4" in said


@pytest.mark.e2e
async def test_a_service_that_is_refused_when_it_starts_again_ends_all(nats: OpenServer, tmp_path: Path) -> None:
    async with control(nats, tmp_path) as running:
        await running.ready()
        planner = running.service("planner")
        assert planner is not None
        shutil.copy(nats.keys.credential_file("detector"), nats.keys.credential_file("planner"))
        planner.kill()
        assert await running.ended() == 2
    assert "planner did not start: it ended with exit status 2" in running.lines.read_text()


@pytest.mark.e2e
async def test_a_second_one_is_refused(nats: OpenServer, tmp_path: Path) -> None:
    async with control(nats, tmp_path) as running:
        await running.ready()
        async with control(nats, tmp_path) as second:
            async with asyncio.timeout(START_S):
                assert await second.process.wait() == 4
        assert "is in use by the process with pid" in second.lines.read_text()
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0


@pytest.mark.slow
async def test_a_port_that_is_taken_is_said_before_anything_starts(nats: OpenServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        async with control(nats, tmp_path, "--port", str(port)) as running:
            assert await running.ended() == 5
    assert f"cannot listen on 127.0.0.1:{port}" in running.lines.read_text()
    assert not (tmp_path / "run" / "log.db").exists()


def test_each_service_serves_its_metrics_at_a_port_of_its_own() -> None:
    assert {name: metrics_address("9100", name) for name in SERVICES} == {
        "detector": "127.0.0.1:9100",
        "planner": "127.0.0.1:9101",
        "transition": "127.0.0.1:9102",
        "api": "",
    }
    assert metrics_address("[::1]:9100", "planner") == "[::1]:9101"
    assert metrics_address("127.0.0.1:0", "planner") == "127.0.0.1:0"
    assert metrics_address("", "planner") == ""
