"""Processes: running a module in one, finding those that belong together, ending them."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from shared.errors import Unavailable


class SeenProcesses:
    """Every process that was below this one at one of several looks."""

    def __init__(self) -> None:
        self._created_at: dict[int, float] = {}

    def look(self) -> None:
        """Note the processes that are below this one now."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                self._created_at[process.pid] = process.create_time()

    def __len__(self) -> int:
        return len(self._created_at)

    def living(self) -> list[int]:
        """Return the pids of noted processes that still live; a process that only got the same pid does not count."""
        left = []
        for pid, created_at in self._created_at.items():
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).create_time() == created_at:
                    left.append(pid)
        return left


def processes_of(run_dir: Path) -> list[int]:
    """Return the pids of all processes that belong to a run directory, by their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get("UNICRON_RUN_DIR", "").startswith(str(run_dir)):
                found.append(process.pid)
    return found


def kill_below(pid: int) -> None:
    """Kill a process and all processes below it."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [*top.children(recursive=True), top]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


async def run_module(module: str, *arguments: str, **environment: str) -> None:
    """Run a module in a process of its own; the process ends with this call, however that ends.

    Args:
        module: to run, as in ``python -m``.
        *arguments: of the module.
        **environment: variables beside those of this process.

    Raises:
        Unavailable: the module failed; the message has the end of what it printed.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise Unavailable(f"{module} ended with {process.returncode}:\n{output.decode(errors='replace')[-2000:]}")
