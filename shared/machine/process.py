"""This process: that it ends with its parent, keeps its memory to itself, and collects garbage seldom."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_DEATH_VARIABLE = "UNICRON_PARENT_DEATH"
"""Environment variable that has the process end with its parent. The value is the parent's pid, or ``1`` for any
parent."""

END_SIGNAL = signal.SIGRTMIN
"""With what a process asks its children to end; nobody else sends it. SIGTERM may go to all processes of a run at once
(a control group of systemd's, a container that ends): those below the first of them leave it to that one
(``leave_sigterm``)."""

_PR_SET_PDEATHSIG = 1
"""The option of ``prctl(2)`` that sets the parent-death signal (value from ``linux/prctl.h``)."""

_libc = ctypes.CDLL(None, use_errno=True)
"""The C library. Loaded at import, because nothing may be loaded between fork and exec."""

_PR_SET_DUMPABLE = 4
"""The option of ``prctl(2)`` (value from ``linux/prctl.h``)."""

THRESHOLDS = (100_000, 20, 20)
"""New objects between two collections, and collections of each generation between two of the next. Chosen: the objects
of some plans of 2,048 nodes, so that most are gone when the collector looks at them. 100,000 small objects take 10
MB."""


def die_with_parent(signum: signal.Signals, parent_pid: int | None = None) -> bool:
    """Have the kernel send ``signum`` to this process when its parent ends; return whether the parent is alive.

    The kernel watches the *thread* that created this process, so children must be started from a thread that lives as
    long as they should. No signal comes for a parent that ended before this call: the caller then has to end by itself.

    Args:
        signum: the signal.
        parent_pid: pid of the parent. Without it, only an end of the parent during the call is noticed.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    _libc.prctl(_PR_SET_PDEATHSIG, signum.value, 0, 0, 0)
    return os.getppid() == expected


def leave_sigterm() -> None:
    """Leave SIGTERM to the parent: have it blocked in this process, and in all that it starts.

    It stays blocked over fork and exec, so it can be called between these two, before the program runs. Ranks, which
    run the user's code, take it again (``unicron.process.processes.take_sigterm``).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def watch_parent() -> bool:
    """Have this process asked to end when its parent ends, if the environment says so; return whether that lives."""
    value = os.environ.get(PARENT_DEATH_VARIABLE, "")
    if not value.isdigit() or value == "0":
        return True
    return die_with_parent(END_SIGNAL, int(value) if value != "1" else None)


def hide_memory() -> None:
    """Have the kernel refuse every other process but root's to read or trace this one; it dumps no core either.

    ``/proc/<pid>/environ`` shows the environment with which the process was started, whatever it has deleted since.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def collect_seldom() -> None:
    """Have the collector run seldom in this process from now on, and not visit the objects that there are already."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Have the collector run seldom within this block."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
