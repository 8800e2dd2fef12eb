"""The whole stack as a user runs it: ``unicron up`` and the other verbs, each a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.condition import until_blocking
from tests.e2e.kit import Client, Record, processes_of

UNICRON = [str(Path(sys.executable).parent / "unicron")]


def cli(*arguments: str, server: str = "", code: int = 0) -> str:
    """Run the command line; return what it printed."""
    done = subprocess.run(
        [*UNICRON, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "UNICRON_SERVER": server},
        check=False,
    )
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout


def start(run_dir: Path, *, nodes: int = 1, workers: int = 2, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """Start ``unicron up`` and wait until it is ready.

    Args:
        run_dir: its run directory.
        nodes: number of nodes.
        workers: of each node.
        environment: further settings.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    size = ["--nodes", str(nodes), "--workers-per-node", str(workers)]
    process = subprocess.Popen(
        [*UNICRON, "up", "--run-dir", str(run_dir), "--port", "0", *size],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
    assert line.startswith("ready http://127.0.0.1:"), line
    return process, line.split()[1]


def events(url: str) -> list[Record]:
    """Return the records of the log."""
    with Client(url) as client:
        return client.items("/v1/events")


def until_gone(run_dir: Path, limit_s: float = 20.0) -> None:
    """Wait until no process of the run directory is left."""
    until_blocking(
        lambda: not processes_of(run_dir), "no process is left", limit_s=limit_s, seen=lambda: processes_of(run_dir)
    )


def stop(process: subprocess.Popen[str], run_dir: Path) -> None:
    """Press Ctrl-C: ``unicron up`` ends well, and no process is left."""
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    until_gone(run_dir, 1.0)
