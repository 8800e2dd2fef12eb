"""The run directory: the folder that a stack writes everything to; a file lock keeps other stacks out."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from shared.errors import Conflict

DEMO_MARKER = "made-by-demo"
"""File in a run directory that only demos have used: the next demo may replace it."""

LOCK = "lock"
"""File in a run directory, locked by the process that uses it; it contains that process's pid."""


class RunDirectory:
    """A folder that one process at a time may use: a stack, or a demo that compares its results."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the folder and take its lock.

        Raises:
            Conflict: another process uses the folder.
        """
        (self.path / "services").mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise Conflict(
                f"run directory {self.path} is in use by the process with pid {owner}; "
                "stop it first or give another --run-dir"
            ) from err
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        self._lock = lock

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        """Acquire the folder for a block."""
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""
        self.release()
