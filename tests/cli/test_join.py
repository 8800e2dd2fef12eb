"""``unicron agent --join FILE``: what it refuses, and the process that it becomes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from cli.main import main
from cli.nodes.agent import MODULE, agent_environment
from services.agent.machine import hardware
from shared.bus import credentials
from shared.errors import InvalidInput
from shared.nats.key_directory import KeyDirectory
from shared.settings.model import read_settings
from tests.condition import until
from tests.nats_server import OpenServer

pytestmark = pytest.mark.timeout(120)

START_S = 60.0
"""An interpreter and its imports take a second or two; the machine may be busy."""


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyDirectory:
    """A key directory as an operator has it; this test's environment has no settings."""
    for name in [*os.environ]:
        if name.startswith("UNICRON_"):
            monkeypatch.delenv(name)
    # What is not refused would take the place of the test's process.
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the command became the agent"))
    made = KeyDirectory(tmp_path / "keys")
    made.make(["nats://control.example:4222"])
    return made


def refused(file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return what the command says to a file, or options, that it must refuse."""
    assert main(["agent", "--join", str(file), *options]) == 2
    return capsys.readouterr().err


def test_a_file_that_cannot_be_used_is_refused(
    keys: KeyDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = keys.add_node("n0")
    missing = tmp_path / "missing.json"
    assert refused(missing, capsys) == f"unicron: --join: {missing} cannot be read: No such file or directory\n"
    file.chmod(0o644)
    assert f"is open to every user (mode 0644): `chmod 600 {file}`" in refused(file, capsys)
    file.chmod(0o640)
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    assert f"{file} is not a node's credential as `unicron node add` made it" in refused(file, capsys)
    file.write_text(text)
    assert "is not the credential of a node" in refused(keys.credential_file("planner"), capsys)


def test_a_file_without_servers_is_refused(
    tmp_path: Path, keys: KeyDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = KeyDirectory(tmp_path / "bare")
    bare.make()
    file = bare.add_node("n0")
    assert "does not say where NATS is: `unicron keys make --server" in refused(file, capsys)
    monkeypatch.setenv("UNICRON_NATS_URL", "nats://control.example:4222")
    assert agent_environment(file, {})["UNICRON_NATS_URL"] == "nats://control.example:4222"


def test_settings_that_are_not_allowed_are_refused(
    keys: KeyDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = keys.add_node("n0")
    assert "workers_per_node" in refused(file, capsys, "--workers", "5000")
    monkeypatch.setenv("UNICRON_NODE", "n1")
    assert "is not the node 'n0'" in refused(file, capsys)
    monkeypatch.delenv("UNICRON_NODE")
    monkeypatch.setenv("UNICRON_NODE_TIMEOUT_S", "0.1")
    assert "heartbeat_interval_s: must be less than node_timeout_s" in refused(file, capsys)


@pytest.mark.parametrize(
    "options", [["--workers", "2"], ["--join", "FILE", "restart", "n0"], ["--domain", "x", "restart", "n0"]]
)
def test_options_that_do_not_go_together_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", *options]) == 2
    assert "--join" in capsys.readouterr().err


def test_the_file_and_the_options_become_settings(
    keys: KeyDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = keys.add_node("n0")
    monkeypatch.setenv("UNICRON_NATS_CREDENTIAL_FD", "7")  # would count before the file
    monkeypatch.setenv("UNICRON_DOMAIN", "rack-1")
    changes = {"workers_per_node": 8, "run_dir": tmp_path / "run"}
    environment = agent_environment(file, changes)
    assert "UNICRON_NATS_CREDENTIAL_FD" not in environment
    monkeypatch.delenv("UNICRON_NATS_CREDENTIAL_FD")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = read_settings()
    assert (settings.workers_per_node, settings.run_dir, settings.domain) == (8, tmp_path / "run", "rack-1")
    assert settings.nats_credential == file


def test_the_workers_are_the_devices_where_nothing_else_is_set(
    keys: KeyDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = keys.add_node("n0")
    devices = hardware.device_count(None)
    assert agent_environment(file, {}).get("UNICRON_WORKERS_PER_NODE") == (str(devices) if devices else None)
    monkeypatch.setattr(hardware, "device_count", lambda *_: 8)  # a machine with GPUs
    assert agent_environment(file, {})["UNICRON_WORKERS_PER_NODE"] == "8"
    assert agent_environment(file, {"workers_per_node": 4})["UNICRON_WORKERS_PER_NODE"] == "4"
    monkeypatch.setenv("UNICRON_WORKERS_PER_NODE", "3")
    assert agent_environment(file, {})["UNICRON_WORKERS_PER_NODE"] == "3"


@pytest.mark.slow
async def test_the_command_becomes_the_supervisor(nats: OpenServer, tmp_path: Path) -> None:
    """Signals reach it, and it is one process: no wrapper stands between."""
    nats.keys.make([nats.url])
    file = nats.keys.add_node("n0")
    assert credentials.read(file).servers == [nats.url]
    nats.reload()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "cli.main", "agent"),
        *("--join", file.name, "--workers", "1", "--run-dir", str(tmp_path / "run")),
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=file.parent,
    )
    try:
        async with asyncio.timeout(START_S):
            main_process = psutil.Process(process.pid)

            def is_supervisor() -> bool:
                assert process.returncode is None
                return MODULE in main_process.cmdline() and bool(main_process.children())

            await until(is_supervisor)
            children = main_process.children()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert psutil.wait_procs(children, timeout=START_S)[1] == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_damaged_credential_is_not_repeated(keys: KeyDirectory) -> None:
    file = keys.add_node("n0")
    seed = json.loads(file.read_text())["seed"]
    file.write_text(file.read_text().replace('"identity"', '"identities"'))
    with pytest.raises(InvalidInput) as err:
        agent_environment(file, {})
    assert seed not in err.value.detail
