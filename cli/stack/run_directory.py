"""The run directory: the folder that a stack writes everything to; a file lock keeps other stacks out."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cli.here import LOCK, PORT
from cli.stack.file_system import mount_of, without_locks
from shared.errors import Conflict, InvalidInput, Unavailable
from shared.settings.model import read_settings

DEMO_MARKER = "made-by-demo"
"""File in a run directory that only demos have used: the next demo may replace it."""

LOOK_S = 0.2
"""Pause before the lock is tried again: a command that looks for a stack (``cli/here.py``) has it for an instant."""

MOUNTS = Path("/proc/self/mounts")

_ELSEWHERE = "mount it with locks, give another --run-dir, or have the log in PostgreSQL (UNICRON_LOG_URL)"


class RunDirectory:
    """A folder that one process at a time may use: a stack, or a demo that compares its results."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the folder and take its lock.

        Raises:
            Conflict: another process uses the folder.
            InvalidInput: other machines would not see its lock, and the log is to be there.
            Unavailable: it cannot be locked.
        """
        self._check_locks()
        (self.path / "services").mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOOK_S)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            owner = os.read(lock, 256).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise Conflict(
                f"run directory {self.path} is in use by the process with pid {owner}; "
                "stop it first or give another --run-dir"
            ) from err
        except OSError as err:
            os.close(lock)
            raise Unavailable(f"run directory {self.path} cannot be locked ({err.strerror}); {_ELSEWHERE}") from err
        (self.path / PORT).unlink(missing_ok=True)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()} on {socket.gethostname()}".encode())
        self._lock = lock

    def _check_locks(self) -> None:
        with suppress(OSError):
            mount = mount_of(str(self.path), MOUNTS.read_text(errors="surrogateescape"))
            problem = without_locks(mount) if mount is not None else ""
            if mount is not None and problem and not read_settings().log_url:
                problem = f"is on {mount.at}: {problem}, and two of them would damage the log; {_ELSEWHERE}"
                raise InvalidInput.of("--run-dir", str(self.path), problem, f"run directory {self.path} {problem}")

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
