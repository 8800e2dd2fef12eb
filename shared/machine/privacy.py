"""Keeping a process's memory and environment, in which credentials are, from other processes of its user."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4
"""The option of ``prctl(2)`` (value from ``linux/prctl.h``)."""


def hide_memory() -> None:
    """Have the kernel refuse every other process but root's to read or trace this one; it dumps no core either.

    ``/proc/<pid>/environ`` shows the environment with which the process was started, whatever it has deleted since.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
