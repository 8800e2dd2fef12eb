"""What the kernel reports about a process: its state, and how its main thread was scheduled (proc(5))."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple

NS_PER_S = 1e9
"""Nanoseconds in a second: ``/proc/<pid>/schedstat`` counts nanoseconds."""


_MOST_BYTES = 4096
"""Bytes that are read of ``stat`` and ``schedstat``, which have fewer: 52 numbers, and a command of at most 64
characters."""


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""Clock ticks in a second: ``/proc/<pid>/stat`` counts processor time in these."""


class Usage(NamedTuple):
    """What a process does: the kernel's letter for its state, and the processor time that it has used, in seconds.

    The time is that of all threads of the process, and of the ended children that it has waited for.
    """

    state: str
    cpu_s: float


def usage(pid: int) -> Usage | None:
    """Return what a process does; None if the process does not exist.

    The letter is the third field of ``/proc/<pid>/stat``: R runs or is ready, S and D sleep, T is stopped, Z has ended.
    """
    try:
        stat = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    # The second field is the command in parentheses. A command may contain parentheses, spaces and broken characters.
    fields = stat.rpartition(b")")[2].split()
    return Usage(fields[0].decode(), sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S)


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for the state of a process; None if the process does not exist."""
    found = usage(pid)
    return found.state if found is not None else None


def children_cpu_s(pid: int) -> float:
    """Return the processor time that the living descendants of a process have used, in seconds.

    A compiler that a rank has started, for instance, computes while the rank itself sleeps. 0 where the kernel does not
    list children (CONFIG_PROC_CHILDREN).
    """
    seconds, left, seen = 0.0, [pid], {pid}
    while left:
        for child in _children(left.pop()):
            if child not in seen and (found := usage(child)) is not None:
                seconds += found.cpu_s
                seen.add(child)
                left.append(child)
    return seconds


def _children(pid: int) -> list[int]:
    """Return the children of a process, whichever of its threads has started them."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    except (OSError, ValueError):  # the process has ended meanwhile, or the list was longer than what was read
        return found
    return found


def _read(path: str) -> bytes:
    """Return the content of a small file of the kernel.

    Neither ``pathlib`` nor a buffer is used: with these, such reads take a third of the agent's processor time.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


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
        ran_ns, waited_ns, _ = _read(f"/proc/{pid}/schedstat").split()
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
    """Return whether a process handles a signal (``SigCgt`` of proc(5)). Most signals end a process that does not."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.partition(":")[2] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def waits_in(pid: int) -> str:
    """Return the function of the kernel in which a process waits; empty if it does not wait, or the kernel hides it."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""
    return "" if name == "0" else name
