"""The frame of a service, in a process of its own: ready, health, signals, exit codes, death of its parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.errors import Conflict, InvalidInput, Unavailable
from shared.log.log import EventLog
from shared.machine.process_names import process_name
from tests.nats_server import OpenServer
from tests.shared.samples import event_id

ROOT = Path(__file__).parents[2]

_SERVICE = """
import asyncio, gc, sys
from shared.errors import Conflict
from shared.service.frame import run
from tests.shared.samples import node_joined

async def main(context):
    how = sys.argv[1]
    if how == "conflict":
        raise Conflict("already there")
    if how == "error":
        raise ZeroDivisionError("oh")
    if how == "return":
        return
    if how == "agent":
        try:
            await context.journal.append([node_joined(1)])
        except RuntimeError:
            print("no journal", flush=True)
    else:
        await context.journal.append([node_joined(1)])
    context.ready()
    context.ready()
    if how == "frozen":
        print(gc.get_freeze_count() > len(gc.get_objects()), flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("stopping", context.stop.is_set(), flush=True)

sys.exit(run("thing", main, journal=sys.argv[1] != "agent"))
"""

Process = asyncio.subprocess.Process
Start = Callable[..., AbstractAsyncContextManager[Process]]


@pytest.fixture
def start(bus_server: OpenServer, tmp_path: Path) -> Start:
    """Return a function that starts the service above in a process of its own."""

    @contextlib.asynccontextmanager
    async def _start(how: str, **environment: str) -> AsyncIterator[Process]:
        variables = {
            "PYTHONPATH": str(ROOT),
            "UNICRON_RUN_DIR": str(tmp_path),
            "UNICRON_NATS_URL": bus_server.url,
            "UNICRON_NATS_CREDENTIAL": str(bus_server.credential_file),
        }
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", _SERVICE, how],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | variables | environment,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    return _start


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_a_service_runs_until_it_is_stopped(
    start: Start, bus: Bus, tmp_path: Path, signum: signal.Signals
) -> None:
    async with start("run") as process:
        assert await line(process) == "ready"
        health = json.loads(await bus.request("unicron.health.thing", b"", timeout_s=40))
        assert health == {
            "name": "thing",
            "pid": process.pid,
            "ready": True,
            "detail": "",
            "handled": 0,
            "counters": {},
            "process": process_name(process.pid),
            "active": True,
            "token": 0,
        }
        process.send_signal(signum)
        output, errors = await process.communicate()
        assert output == b"stopping True\n"
        assert process.returncode == 0
        assert f"{signum.name}: stopping".encode() in errors
    with pytest.raises(Unavailable):
        await bus.request("unicron.health.thing", b"", timeout_s=1)
    log = EventLog(f"sqlite:///{tmp_path / 'log.db'}", read_only=True)
    assert [record.event.event_id for record in log.read()] == [event_id(1)]
    log.close()
    assert (await bus.jetstream.stream_info("UNICRON_LOG")).state.last_seq == 1


async def test_what_a_service_has_loaded_at_its_start_is_not_collected_again_and_again(start: Start) -> None:
    async with start("frozen") as process:
        assert [await line(process), await line(process)] == ["ready", "True"]


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("conflict", Conflict.exit_code, "conflict: already there"),
        ("error", 1, "ZeroDivisionError: oh"),
        pytest.param("return", 0, "", marks=pytest.mark.slow),
    ],
)
async def test_exit_codes(start: Start, how: str, code: int, words: str) -> None:
    async with start(how) as process:
        output, errors = await process.communicate()
        assert process.returncode == code
        assert words in errors.decode()
        assert output == b""


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"UNICRON_PORT": "none"}, ["invalid-input: ", "port: ", "given: 'none'"]),
        pytest.param(
            {"UNICRON_HEARTBEAT_INTERVAL_S": "2", "UNICRON_NODE_TIMEOUT_S": "1.25"},
            ["invalid-input: ", "heartbeat_interval_s: must be less than node_timeout_s, which is 1.25", "given: 2.0"],
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_settings_that_cannot_be_used(start: Start, variables: dict[str, str], words: list[str]) -> None:
    async with start("run", **variables) as process:
        _, errors = await process.communicate()
        assert process.returncode == InvalidInput.exit_code
        assert [word for word in words if word not in errors.decode()] == []


async def test_a_file_that_is_not_a_log(start: Start, tmp_path: Path) -> None:
    (tmp_path / "log.db").write_text("something else" * 100)
    async with start("run") as process:
        _, errors = await process.communicate()
        assert process.returncode == 6
        assert "file is not a database" in errors.decode()


async def test_an_agent_has_no_journal(start: Start, tmp_path: Path) -> None:
    async with start("agent") as process:
        assert await line(process) == "no journal"
        assert await line(process) == "ready"
        assert not (tmp_path / "log.db").exists()


async def test_a_key_that_is_refused_for_a_while_ends_no_service(start: Start, nats: OpenServer) -> None:
    async with start("run") as process:
        assert await line(process) == "ready"
        nats.refuse()
        assert process.stderr is not None
        while b"access-denied" not in await process.stderr.readline():
            assert process.returncode is None
        nats.accept()
        while b"connected again" not in await process.stderr.readline():
            assert process.returncode is None
        process.terminate()
        await process.communicate()
        assert process.returncode == 0


_PARENT = """
import subprocess, sys, os, time
environment = dict(os.environ)
environment["UNICRON_PARENT_DEATH"] = str(os.getpid()) if sys.argv[1] == "pid" else "1"
child = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE, env=environment)
assert child.stdout.readline() == b"ready\\n"
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("value", ["1", "pid"])
def test_it_ends_with_its_parent(bus_server: OpenServer, tmp_path: Path, value: str) -> None:
    variables = {
        "PYTHONPATH": str(ROOT),
        "UNICRON_RUN_DIR": str(tmp_path),
        "UNICRON_NATS_URL": bus_server.url,
        "UNICRON_NATS_CREDENTIAL": str(bus_server.credential_file),
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, value, sys.executable, "-c", _SERVICE, "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | variables,
    )
    try:
        assert parent.stdout is not None
        service = os.pidfd_open(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate()
    ended, _, _ = select.select([service], [], [], 10)
    os.close(service)
    assert ended


async def test_a_parent_that_is_gone_already(start: Start) -> None:
    async with start("run", UNICRON_PARENT_DEATH=str(2**22)) as process:  # above Linux's largest pid
        _, errors = await process.communicate()
        assert process.returncode == 1
        assert "the parent is gone" in errors.decode()
