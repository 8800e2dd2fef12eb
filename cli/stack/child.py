"""A child process of the stack: a service or a node agent, which prints ``ready`` once it serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cli.stack.processes import kill_below
from shared.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable, UnicronError
from shared.machine.process import END_SIGNAL, leave_sigterm

START_TIMEOUT_S = 120.0
"""Importing torch and Megatron in every node's fork server takes 5-10 s each; several share the cores."""

EXIT_S = 5.0
"""From the end of a process's output to its own end, which says why. It takes milliseconds."""

REFUSALS: dict[int, type[UnicronError]] = {
    kind.exit_code: kind for kind in (InvalidInput, NotFound, Conflict, Unavailable, Corrupt)
}
"""Exit status of a service -> the kind of its error."""

STOP_TIMEOUT_S = 10.0
"""Time from ``END_SIGNAL`` to SIGKILL. A service stops in milliseconds, an agent ends its ranks first."""

RECENT_S = 60.0
"""Starts within this time count as recent."""


@dataclass
class Child:
    """A child process, its environment, and when it was started recently.

    ``run_dir``: where it works; its log is in there. None: it works where this process does, and logs to the same
    standard error. ``start_timeout_s``: longest time until it is ready; None: as long as it takes. ``expected_end``:
    this process ends it, or lets it be killed; it is not started again then. ``refused``: the last time it was not
    ready when it ended.
    """

    name: str
    module: str
    environment: dict[str, str]
    run_dir: Path | None
    start_timeout_s: float | None = START_TIMEOUT_S
    process: asyncio.subprocess.Process | None = None
    starts: list[float] = field(default_factory=list)
    expected_end: bool = False
    refused: bool = False

    async def start(self) -> asyncio.subprocess.Process:
        """Start the process in a session of its own, and wait until it is ready; its log is appended to.

        Raises:
            UnicronError: the process did not become ready, and has ended; of the kind that its exit status says, or
                ``Unavailable``.
        """
        self.expected_end, self.refused = False, True
        self.starts.append(time.monotonic())
        with contextlib.ExitStack() as files:
            log = None if self._log_path is None else files.enter_context(self._log_path.open("ab"))
            process = self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self.module),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                preexec_fn=leave_sigterm,
                cwd=self.run_dir,
            )
        assert process.stdout is not None
        with suppress(TimeoutError):
            line = await asyncio.wait_for(process.stdout.readline(), self.start_timeout_s)
            if line.strip() == b"ready":
                self.refused = False
                return process
            await asyncio.wait_for(process.wait(), EXIT_S)
        with suppress(ProcessLookupError):
            process.kill()
        raise self._refusal(await process.wait())

    def _refusal(self, code: int) -> UnicronError:
        """Return why the process did not start: in its last words, if these are an error that it names."""
        kind = REFUSALS.get(code, Unavailable)
        if self._log_path is not None:
            return kind(_why(self.name, self._log_path))
        ended = f"ended with exit status {code}" if code >= 0 else f"was ended by signal {-code}"
        return kind(f"{self.name} did not start: it {ended}; its last line says why")

    @property
    def _log_path(self) -> Path | None:
        return None if self.run_dir is None else self.run_dir / "services" / f"{self.name}.log"

    def recent_starts(self) -> int:
        """Return how often the process was started recently."""
        now = time.monotonic()
        self.starts = [at for at in self.starts if now - at < RECENT_S]
        return len(self.starts)

    @property
    def living(self) -> asyncio.subprocess.Process | None:
        """The process, if it has not ended."""
        return self.process if self.process is not None and self.process.returncode is None else None

    def tree(self) -> list[psutil.Process]:
        """Return the process and all processes below it, the process first; empty if it has ended."""
        process = self.living
        if process is None:
            return []
        top = psutil.Process(process.pid)
        return [top, *top.children(recursive=True)]

    def kill(self) -> int | None:
        """Kill the process; return its pid, None if it has ended."""
        process = self.living
        if process is None:
            return None
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        return process.pid

    async def end(self) -> None:
        """End the process: ``END_SIGNAL``, and SIGKILL for it and all below it if that does not suffice."""
        process = self.living
        if process is None:
            return
        self.expected_end = True
        with suppress(ProcessLookupError):
            process.send_signal(END_SIGNAL)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            kill_below(process.pid)
            await process.wait()


def _why(name: str, log_path: Path) -> str:
    """Return why a child did not start: its last words, if these are an error that it names; else its log's end."""
    lines = log_path.read_text(errors="replace").splitlines()
    named = re.search(r" ERROR \S+ shared\.service\.frame: ([a-z-]+: .*)", lines[-1]) if lines else None
    if named is not None:
        return f"{name} did not start: {named.group(1)}"
    tail = "\n".join(lines)[-2000:]
    return f"{name} did not start; the end of {log_path}:\n{tail}"
