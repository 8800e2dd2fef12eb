"""What the kernel says of a process (proc(5))."""

from __future__ import annotations

from pathlib import Path

NS_PER_S = 1e9


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for a process (third field of stat), None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses, which may itself hold any character.
    return stat.rpartition(")")[2].split()[0]


def starved(pid: int | None) -> float | None:
    """Return how many seconds in its life a process's main thread was ready to run and had no CPU.

    None if there is no such process, or the kernel does not count it (CONFIG_SCHED_INFO).
    """
    try:
        _, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(waited_ns) / NS_PER_S
