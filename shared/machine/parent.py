"""Parent-death signals of Linux: a child process that ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_DEATH_VARIABLE = "UNICRON_PARENT_DEATH"
"""Environment variable: the process ends with its parent. The value is the parent's pid, or ``1`` for any parent."""

_PR_SET_PDEATHSIG = 1
"""The option of ``prctl(2)`` that sets the parent-death signal (value from ``linux/prctl.h``)."""

_libc = ctypes.CDLL(None, use_errno=True)
"""The C library. Loaded at import, because nothing may be loaded between fork and exec."""


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


def watch_parent() -> bool:
    """Have SIGTERM sent when the parent ends, if the environment asks for it; return whether the parent is alive."""
    value = os.environ.get(PARENT_DEATH_VARIABLE, "")
    if not value.isdigit() or value == "0":
        return True
    return die_with_parent(signal.SIGTERM, int(value) if value != "1" else None)
