"""What the kernel says of a process (proc(5))."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

NS_PER_S = 1e9


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for a process (third field of stat), None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, which may itself hold any character, or half of one.
    return stat.rpartition(")")[2].split()[0]


class Scheduled(NamedTuple):
    """Seconds in a thread's life on a CPU, and ready to run without one."""

    ran_s: float
    waited_s: float


def scheduled(pid: int | None) -> Scheduled | None:
    """Return how a process's main thread was scheduled so far.

    A wait is counted when it is over. None if there is no such process, or the kernel does not count
    (CONFIG_SCHED_INFO).
    """
    try:
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return Scheduled(int(ran_ns) / NS_PER_S, int(waited_ns) / NS_PER_S)


def starved_s(before: Scheduled | None, now: Scheduled | None, elapsed_s: float, state: str | None) -> float:
    """Return how much of the last ``elapsed_s`` a thread lacked a CPU, at most.

    One that is ready to run (``state`` R) may be in a wait that is not counted yet: only what it ran is certain.
    """
    if before is None or now is None:
        return 0.0
    if state == "R":
        return max(0.0, elapsed_s - (now.ran_s - before.ran_s))
    return max(0.0, now.waited_s - before.waited_s)
