"""The run directory of the working folder: the address of the stack that runs in it, or whether one has."""

from __future__ import annotations

import fcntl
from pathlib import Path

DEFAULT_RUN_DIR = Path(".unicron")

LOCK = "lock"
"""File in a run directory, locked by the process that uses it; it contains that process's pid and machine."""

PORT = Path("services", "api.port")
"""File in a run directory with the port of its api; whoever takes the lock removes an older one."""


def address(run_dir: Path = DEFAULT_RUN_DIR) -> str | None:
    """Return the address of the stack that runs in a run directory; None: none does, or not yet."""
    if not _is_used(run_dir):
        return None
    try:
        return f"http://127.0.0.1:{int((run_dir / PORT).read_text())}"
    except (OSError, ValueError):
        return None


def advice(run_dir: Path = DEFAULT_RUN_DIR) -> str:
    """Return what lets one look at a run that has ended; empty: none has, or one runs."""
    if _is_used(run_dir) or not (run_dir / "log.db").is_file():
        return ""
    return f"; {run_dir} has the log of a run that has ended: `unicron up --nodes 0` in this folder shows it"


def _is_used(run_dir: Path) -> bool:
    """Return whether a process has the lock of a run directory."""
    try:
        with (run_dir / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
