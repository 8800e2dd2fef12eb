"""A script as a child of its rank process: started, watched, and ended with all that it has begun.

The child stays in the process group of its rank, which the fork server kills when the rank has ended, and gets a signal
when the rank ends. Its output passes through the rank, which copies it and keeps its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from unicron.process.processes import PR_SET_PDEATHSIG

TAIL_BYTES = 64 * 1024
"""Number of bytes kept of the end of the output: several tracebacks."""

DRAIN_S = 1.0
"""How long the rest of the output of an ended script may take; a process that the script has left may keep it open."""

LOOK_S = 0.02
"""Pause between two looks whether processes that were asked to end have ended: short beside a new start."""

_LINE_BYTES = 64 * 1024
"""Longest line of the output; the rest of a longer line counts as the next: the lines that are looked for are short."""


class ScriptProcess:
    """A running script.

    Args:
        command: the script's command line.
        environment: all of the script's variables.
        on_line: called with each line of its output, on a thread of its own.
        on_end: called when it has ended, on a thread of its own.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_line: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_line, self._on_end = on_line, on_end
        self._tail = bytearray()
        libc, parent = ctypes.CDLL(None), os.getpid()

        def end_with_rank() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        # Only what was loaded before the fork is called in the child: threads of the rank may hold locks.
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_rank,
        )
        self._code: int | None = None
        self._copier = threading.Thread(target=self._copy, name="unicron-script-output", daemon=True)
        self._copier.start()
        threading.Thread(target=self._wait, name="unicron-script-end", daemon=True).start()

    @property
    def code(self) -> int | None:
        """The exit status, or the negative number of a signal; None while the script runs."""
        return self._code

    def has_ended(self) -> bool:
        """Return whether the script has ended."""
        return self._code is not None

    @property
    def tail(self) -> str:
        """The end of what the script has printed."""
        return bytes(self._tail).decode(errors="replace")

    def end(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End the script and all processes that it has left in its group; return when they have ended.

        Args:
            grace_s: how long they may take from SIGTERM on; then they get SIGKILL.
            hurry: whether they are to get it at once.
        """
        _signal_all(signal.SIGTERM)
        until_s = time.monotonic() + grace_s
        while _others() and time.monotonic() < until_s and not hurry():
            time.sleep(LOOK_S)
        while _others():
            _signal_all(signal.SIGKILL)  # once more, for processes that were begun meanwhile
            time.sleep(LOOK_S)

    def _wait(self) -> None:
        code = self._process.wait()
        self._copier.join(DRAIN_S)
        self._code = code
        self._on_end()

    def _copy(self) -> None:
        assert self._process.stdout is not None
        line = bytearray()
        while data := os.read(self._process.stdout.fileno(), 64 * 1024):
            sys.stdout.buffer.write(data)  # this stream never fails (``unicron.process.output``)
            sys.stdout.buffer.flush()
            self._tail += data
            del self._tail[: max(0, len(self._tail) - TAIL_BYTES)]
            line += data
            while (end := line.find(b"\n")) >= 0 or len(line) > _LINE_BYTES:
                cut = end + 1 if end >= 0 else _LINE_BYTES
                self._on_line(bytes(line[:cut]).decode(errors="replace"))
                del line[:cut]
        self._process.stdout.close()


def _others() -> list[int]:
    """Return the other living processes of this one's group."""
    own, group = os.getpid(), os.getpgrp()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != own and _is_in(pid, group)]


def _is_in(pid: int, group: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[2]) == group


def _signal_all(number: signal.Signals) -> None:
    for pid in _others():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
