"""A child that ends with its parent: Linux parent-death signals."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
"""``prctl(2)``: the signal this process gets when the thread that created it ends."""

_libc = ctypes.CDLL(None, use_errno=True)
"""Loaded at import, so that nothing is loaded between fork and exec."""


def die_with_parent(signum: signal.Signals, parent_pid: int | None = None) -> bool:
    """Ask for ``signum`` when the parent ends; return whether the parent is still there.

    The kernel watches the *thread* that made this process: start children from a thread that lives as long as they
    should. A parent that ended before this call sends nothing any more; compare with ``parent_pid`` tells.

    Args:
        signum: what to send.
        parent_pid: who the parent is; without it only a change during the call is noticed.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    _libc.prctl(_PR_SET_PDEATHSIG, signum.value, 0, 0, 0)
    return os.getppid() == expected
