"""docs/tour.md, command by command, with real processes in a fresh folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tour_page import Step, captured, difference, lacking, rewritten, steps
from tests.e2e.kit import ROOT, processes_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

TOUR = ROOT / "docs" / "tour.md"

LIMIT_S = 90.0
"""Longest wait for an output that a command is repeated for: a start of three ranks on a busy machine takes twenty."""

WIDTH = "100"
"""Columns of the page's outputs."""

HOME, PORT = "/home/you/unicron", "8642"
"""The folder and the port that the page shows."""

RECORD = "UNICRON_TOUR_RECORD"
"""Set: the outputs of this run are written into the page, to be looked at and committed."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """What the reader has after clone and install, as far as the commands use it."""
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    yield tmp_path
    for pid in processes_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


class Reader:
    """Types the commands of the page into two terminals.

    Args:
        folder: is the working directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._values: dict[str, str] = {}
        self._stack: subprocess.Popen[str] | None = None
        self._port = PORT
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
        self._environment = {**inherited, "PYTHONPATH": str(ROOT), "UNICRON_COLUMNS": WIDTH}

    def follow(self, step: Step, *, compare: bool) -> str:
        """Type a command; return what it printed, which has to be as the page shows it if ``compare``."""
        if step.rules.background:
            output = self._start(step)
        else:
            output = self._until_as_shown(step, compare=compare)
        if compare:
            assert not (found := difference(step, output)), found
        self._values |= captured(step, output)
        return output

    def press_ctrl_c(self) -> None:
        """End what goes on in the first terminal."""
        if self._stack is not None:
            self._stack.send_signal(signal.SIGINT)
            assert self._stack.wait(timeout=60) == 0
            self._stack = None

    def close(self) -> None:
        """End whatever is left."""
        if self._stack is not None:
            self._stack.kill()
            self._stack.wait()

    def _start(self, step: Step) -> str:
        """Start the stack at a free port, which the other commands are told, and wait for its line."""
        self._stack = subprocess.Popen(
            ["bash", "-c", f"exec {step.command} --port 0"],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._stack.stdout is not None
        with self._stack.stdout:
            line = self._stack.stdout.readline()
        assert line.startswith("ready "), line
        self._environment["UNICRON_SERVER"] = url = line.split()[1]
        self._port = url.rpartition(":")[2]
        return self._as_at_home(line)

    def _as_at_home(self, output: str) -> str:
        """Return an output with the folder and the port that a reader has."""
        return output.replace(str(self._folder), HOME).replace(f":{self._port}", f":{PORT}")

    def _until_as_shown(self, step: Step, *, compare: bool) -> str:
        command = step.command
        for there, here in self._values.items():
            command = re.sub(rf"\b{re.escape(there)}\b", here, command)
        deadline = time.monotonic() + LIMIT_S
        while True:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self._folder,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            output = self._as_at_home(done.stdout)
            assert done.returncode == 0, (command, done.returncode, output, done.stderr)
            if not step.rules.repeat or time.monotonic() > deadline:
                return output
            # A page that is recorded has no output to compare with: what it must have is all there is.
            if not (difference(step, output) if compare else lacking(step, output)):
                return output
            time.sleep(0.2)


def test_every_command_prints_what_the_page_shows(folder: Path) -> None:
    page = TOUR.read_text()
    record = RECORD in os.environ
    reader = Reader(folder)
    outputs = []
    try:
        for step in steps(page):
            if "replay" in step.command:
                reader.press_ctrl_c()  # as the page says before it
            outputs.append(reader.follow(step, compare=not record))
    finally:
        reader.close()
    if record:
        TOUR.write_text(rewritten(page, outputs))
