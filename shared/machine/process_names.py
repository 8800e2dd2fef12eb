"""Names of processes that say on which machine a process runs, and by which its end is noticed from beside it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_ENDED = "ZX"
"""States of a process that has ended (proc(5))."""

_STATE, _START = 0, 19
"""Places of the state and of the start time in /proc/<pid>/stat, behind the name in parentheses."""


def process_name(pid: int | None = None) -> str:
    """Return the name of a process that is seen from here: ``host/pid/where/start``. None: this process.

    ``where`` is the same for the processes that see one another by their pids: those of one boot of a machine and one
    namespace of pids.
    """
    pid = os.getpid() if pid is None else pid
    fields = _stat(pid)
    return f"{socket.gethostname()}/{pid}/{_where()}/{fields[_START] if fields else ''}"


def shown(name: str) -> str:
    """Return who a process is, for people."""
    if not name:
        return "process of an older version"
    host, _, rest = name.partition("/")
    return f"process {rest.partition('/')[0]} on {host}"


def is_here(name: str) -> bool:
    """Return whether a process can be seen by its pid from here."""
    return name.split("/")[2:3] == [_where()]


def is_known_to_have_ended(name: str) -> bool:
    """Return whether a process has ended for certain; False for one that cannot be seen from here."""
    parts = name.split("/")
    if len(parts) != 4 or not is_here(name) or not parts[1].isdigit():
        return False
    pid, start = int(parts[1]), parts[3]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it lives, and is another user's
    fields = _stat(pid)
    return fields is not None and (fields[_STATE] in _ENDED or fields[_START] != start)


def _where() -> str:
    try:
        return f"{_BOOT.read_text().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """Return the fields of a process behind its name; None where they cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
