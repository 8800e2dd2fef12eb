"""The program that measures a machine, with the real torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

QUANTITIES = ["disk write", "disk read", "host memory", "processor matrix products", "all-reduce"]


def run(folder: Path, part_s: float) -> list[dict[str, object]]:
    request = {"folder": str(folder), "devices": 0, "part_s": part_s}
    command = [sys.executable, "-P", "-m", "unicron.process.preflight", json.dumps(request)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_a_machine_without_devices_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    found = run(tmp_path, 50.0)
    assert [line.get("quantity") for line in found] == QUANTITIES
    assert all(float(str(line["value"])) > 0 for line in found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_part_that_fails_or_is_late_leaves_the_others(tmp_path: Path) -> None:
    found = run(tmp_path / "none", 50.0)
    assert str(found[0]["problem"]).startswith("disk: FileNotFoundError")
    assert [line.get("quantity") for line in found[1:]] == QUANTITIES[2:]
    assert run(tmp_path, 0.0) == [
        {"problem": f"{name}: not done within 0 s"} for name in ("disk 0", "node 0", "all-reduce 0", "all-reduce 1")
    ]
    assert list(tmp_path.iterdir()) == []


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
