"""What the gate leaves out is run by `make test-nightly`: no marker and no selection loses a test."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BY_HAND = ("tests/containers/", "tests/slurm/", "tests/e2e/test_warm_up.py::test_many_faults_")
"""What has a target of its own that is no part of the night: it needs more than a machine, or takes hours."""

COLLECTION_S = 120
"""A collection takes 15 s, and longer on a busy machine."""


def recipe(target: str) -> list[list[str]]:
    """Return the arguments of each pytest that a target runs."""
    run = ["make", "--dry-run", "--always-make", target]
    lines = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    commands = [shlex.split(line) for line in lines.splitlines() if "python -m pytest" in line]
    assert commands, target
    return [command[command.index("pytest") + 1 :] for command in commands]


@cache
def collected(*arguments: str) -> frozenset[str]:
    """Return the tests that pytest collects with these arguments."""
    command = [sys.executable, "-m", "pytest", *arguments, "--collect-only", "-q", "-n", "0"]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=COLLECTION_S, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:]
    return frozenset(line for line in ended.stdout.splitlines() if "::" in line)


def run_by(target: str) -> frozenset[str]:
    return frozenset().union(*(collected(*arguments) for arguments in recipe(target)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_night_has_every_test() -> None:
    everything = collected()
    assert len(everything) > 5000
    by_hand = {test for test in everything if test.startswith(BY_HAND)}
    night = run_by("test-nightly")
    assert everything - night == by_hand
    assert run_by("test") < night
