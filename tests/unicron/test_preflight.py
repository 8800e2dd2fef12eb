"""The program that measures a machine, with the real torch."""

from __future__ import annotations

import json
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
