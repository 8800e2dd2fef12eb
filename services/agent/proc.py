"""What the kernel reports about a process: its state, and how its main thread was scheduled (proc(5))."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

NS_PER_S = 1e9
"""``/proc/<pid>/schedstat`` counts nanoseconds."""


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for the state of a process; None if the process does not exist.

    The letter is the third field of ``/proc/<pid>/stat``: R runs or is ready, S and D sleep, T is stopped, Z has ended.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses. A command may contain parentheses, spaces and broken characters.
    return stat.rpartition(")")[2].split()[0]


class Scheduled(NamedTuple):
    """How a thread was scheduled since its start: seconds on a CPU, and seconds ready to run without a CPU."""

    ran_s: float
    waited_s: float


def scheduled(pid: int | None) -> Scheduled | None:
    """Return how the main thread of a process was scheduled so far.

    The kernel adds a wait to the count when the wait is over.

    Returns:
        None if there is no such process, or the kernel does not count (CONFIG_SCHED_INFO).
    """
    try:
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return Scheduled(int(ran_ns) / NS_PER_S, int(waited_ns) / NS_PER_S)


def starved_s(before: Scheduled | None, now: Scheduled | None, elapsed_s: float, state: str | None) -> float:
    """Return for how long, at most, a thread lacked a CPU between two readings.

    Args:
        before: the reading at the start; None if unknown.
        now: the reading at the end; None if unknown.
        elapsed_s: seconds between the readings.
        state: the kernel's letter at the end. A thread in state R may be in a wait that the kernel has not counted
            yet, so all time that the thread did not run is taken for a wait.
    """
    if before is None or now is None:
        return 0.0
    if state == "R":
        return max(0.0, elapsed_s - (now.ran_s - before.ran_s))
    return max(0.0, now.waited_s - before.waited_s)


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal (``SigCgt`` of proc(5)); without one, most end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.partition(":")[2] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def waits_in(pid: int) -> str:
    """Return the function of the kernel in which a process waits; empty if it does not, or the kernel hides it."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""
    return "" if name == "0" else name
