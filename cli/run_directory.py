"""The run directory: the folder that a stack writes everything to; a file lock keeps other stacks out."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from shared.errors import Conflict

DEMO_MARKER = "made-by-demo"
"""File in a run directory that only demos have used: the next demo may replace it."""

LOCK = "lock"
"""File in a run directory, locked by the stack that uses it; it contains that stack's pid."""


class RunDirectory:
    """A folder that one stack at a time may use."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the folder and take its lock.

        Raises:
            Conflict: another stack uses the folder.
        """
        (self.path / "services").mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise Conflict(
                f"run directory {self.path} is in use by the stack with pid {owner}; "
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
