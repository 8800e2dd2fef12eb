"""The program that measures a machine, with the real torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unicron.zygote import zygote

QUANTITIES = ["disk write", "disk read", "host memory", "processor matrix products", "all-reduce"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the program writes and reads."""
    (made := tmp_path / "measured").mkdir()
    return made


def run(folder: Path, part_s: float, output: Path) -> list[dict[str, object]]:
    """Run the program, forked from a process that has imported torch; it prints into a folder."""
    output.mkdir()
    request = {"folder": str(folder), "devices": 0, "part_s": part_s}
    zygote().run(["-m", "unicron.process.preflight", json.dumps(request)], output)
    return [json.loads(line) for line in (output / "output").read_text().splitlines()]


def test_a_machine_without_devices_is_measured_and_nothing_stays(folder: Path, tmp_path: Path) -> None:
    found = run(folder, 50.0, tmp_path / "first")
    assert [line.get("quantity") for line in found] == QUANTITIES
    assert all(float(str(line["value"])) > 0 for line in found)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_part_that_fails_or_is_late_leaves_the_others(folder: Path, tmp_path: Path) -> None:
    found = run(folder / "none", 50.0, tmp_path / "first")
    assert str(found[0]["problem"]).startswith("disk: FileNotFoundError")
    assert [line.get("quantity") for line in found[1:]] == QUANTITIES[2:]
    assert run(folder, 0.0, tmp_path / "second") == [
        {"problem": f"{name}: not done within 0 s"} for name in ("disk 0", "node 0", "all-reduce 0", "all-reduce 1")
    ]
    assert list(folder.iterdir()) == []


def neighbour(port: int, part_s: float, listener: socket.socket | None = None) -> subprocess.Popen[str]:
    """Start the program of one of two nodes; that of the listener has the store."""
    fds = [] if listener is None else [listener.fileno()]
    place = {"host": "127.0.0.1", "port": port, "fd": fds[0] if fds else None}
    request = json.dumps({"neighbour": place, "devices": 0, "part_s": part_s})
    command = [sys.executable, "-P", "-m", "unicron.process.preflight", request]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, pass_fds=fds)


def said(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


def test_two_nodes_measure_between_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        both = [neighbour(port, 60.0, listener), neighbour(port, 60.0)]
        for process in both:
            [found] = said(process)
            assert found["quantity"] == "all-reduce with a neighbour"
            assert float(str(found["value"])) > 0


@pytest.mark.slow
def test_a_neighbour_that_does_not_come_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = neighbour(listener.getsockname()[1], 1.0, listener)
        [found] = said(process)
    assert str(found["problem"]).startswith("all-reduce with a neighbour")
