"""How an agent, and ``unicron doctor``, measure the machine: the program is run, bounded and read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from cli.doctor.preflight import preflight
from cli.options import Format
from services.agent.machine import preflight as measuring
from services.agent.machine.hardware import Devices
from services.agent.machine.preflight import measure
from shared.events.measurements import Measurement
from shared.settings.model import Settings, read_settings
from tests.condition import until

DEVICES = Devices(("0", "1"), ("NVIDIA H100 80GB HBM3",) * 2, "1")


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody trains on this machine, whatever other tests do."""
    monkeypatch.setattr(measuring, "in_use", lambda: "")


def python(folder: Path, *script: str) -> str:
    """Return a stand-in for the Python of the ranks that prints what it likes."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *script]))
    path.chmod(0o755)
    return str(path)


def says(**line: object) -> str:
    return f"echo '{json.dumps(line)}'"


async def test_what_the_program_prints_is_read_and_what_libraries_print_is_not(tmp_path: Path) -> None:
    script = [
        "echo 'NCCL version 2.27'",
        "echo '[1, 2]'",
        says(quantity="matrix products", device=1, value=7e14),
        says(quantity="disk write", device=None, value=2e8),
        says(quantity="noise", device=None, value=1.0),
        says(quantity="disk read", device=None, value=-1.0),
        says(problem="device: no kernel image"),
    ]
    found = await measure(python(tmp_path, *script), tmp_path, DEVICES)
    assert (str(found), found.problems) == ("2 x NVIDIA H100 80GB HBM3", ["device: no kernel image"])
    assert [str(rate) for rate in found.rates] == ["matrix products of device 1: 700 TFLOP/s", "disk write: 200 MB/s"]


async def test_the_program_is_shown_the_devices_of_the_node(tmp_path: Path) -> None:
    shown = 'echo "{\\"problem\\": \\"$CUDA_VISIBLE_DEVICES by $CUDA_DEVICE_ORDER\\"}"'
    assert (await measure(python(tmp_path, shown), tmp_path, DEVICES)).problems == ["0,1 by PCI_BUS_ID"]
    found = await measure(python(tmp_path, shown), tmp_path, Devices())
    assert found.problems == [" by PCI_BUS_ID"]
    assert found.count >= 1
    assert found.device


async def test_all_that_the_program_has_started_is_killed_with_it(tmp_path: Path) -> None:
    path = python(tmp_path, "sleep 600 & echo $! > $0.child.partial; mv $0.child.partial $0.child", "wait")
    measuring = asyncio.create_task(measure(path, tmp_path, Devices()))
    await until((tmp_path / "python.child").exists)
    measuring.cancel()  # as when the agent is asked to end
    with pytest.raises(asyncio.CancelledError):
        await measuring
    child = int((tmp_path / "python.child").read_text())
    await until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


async def test_it_is_killed_too_where_it_has_begun_and_its_start_is_not_known_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled, create = asyncio.Event(), asyncio.Event(), asyncio.create_subprocess_exec
    started: list[asyncio.subprocess.Process] = []

    async def slowly(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(await create(*command, **options))
        begun.set()
        await cancelled.wait()
        return started[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    measuring = asyncio.create_task(measure(python(tmp_path, "sleep 600"), tmp_path, Devices()))
    await begun.wait()
    measuring.cancel()
    cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.slow
async def test_what_was_measured_stays_when_the_time_is_over(tmp_path: Path) -> None:
    path = python(tmp_path, says(quantity="disk write", device=None, value=2e8), "sleep 600")
    found = await measure(path, tmp_path, Devices(), limit_s=5.0)
    assert found.problems == ["not done within 5 s"]
    assert [rate.value for rate in found.rates] == [2e8]


async def test_a_program_that_fails_is_said(tmp_path: Path) -> None:
    found = await measure(python(tmp_path, "echo 'No module named torch' >&2", "exit 3"), tmp_path, Devices())
    assert found.problems[0].endswith("-m unicron.process.preflight ended with 3: No module named torch")
    found = await measure(str(tmp_path / "none"), tmp_path, Devices())
    assert found.problems[0].endswith("none cannot be run (No such file or directory)")


async def test_nothing_is_measured_while_somebody_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "in_use", lambda: "process 7 belongs to a task")
    found = await measure(python(tmp_path, f"touch {tmp_path}/ran"), tmp_path, Devices())
    assert found.problems == ["not measured: process 7 belongs to a task"]
    assert not (tmp_path / "ran").exists()


async def test_the_children_of_fork_servers_belong_to_tasks() -> None:
    program = "import subprocess; subprocess.run(['sleep', '600'])"
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, measuring.FORK_SERVER, start_new_session=True
    )
    try:
        await until(lambda: psutil.Process(server.pid).children())
        (child,) = psutil.Process(server.pid).children()
        forked = [*measuring._forked()]
        assert child.pid in forked
        assert server.pid not in forked
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        await server.wait()


@pytest.mark.parametrize(
    ("value", "verdict", "code"),
    [(7e14, "accepted", 0), (1e14, "refused", 1)],
)
def test_the_doctor_measures_this_machine(
    value: float,
    verdict: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = python(tmp_path, says(quantity="matrix products", device=0, value=value))
    settings = read_settings(run_dir=tmp_path / "run", interpreters=path)
    monkeypatch.setattr("services.agent.machine.hardware.devices", lambda _: DEVICES)
    assert doctor(settings, Format.JSON) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == verdict
    assert ("at least 513 TFLOP/s expected" in answer["reason"]) == bool(code)
    assert Measurement.model_validate(answer["measurement"]).rates[0].bound == pytest.approx(0.7 * 0.74 * 989.4e12)
    doctor(settings, Format.TEXT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"2 x NVIDIA H100 80GB HBM3: {verdict}"
    assert lines[1].split()[:2] == ["MEASURED", "RATE"]


def test_the_doctor_fails_where_nothing_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = read_settings(run_dir=tmp_path, interpreters=python(tmp_path, says(problem="disk: full")))
    assert doctor(settings, Format.TEXT) == 1
    assert "disk: full" in capsys.readouterr().out


def doctor(settings: Settings, output: Format) -> int:
    """Run the doctor; return its exit status."""
    try:
        preflight(settings, output)
    except typer.Exit as err:
        return err.exit_code
    return 0
