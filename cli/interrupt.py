"""Ctrl-C in verbs that follow a stream."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code: 128 + SIGINT, as shells do."""


def end_at_once() -> None:
    """Let Ctrl-C end the process at once, for verbs that print a stream without end.

    The usual ``KeyboardInterrupt`` is lost where Python ignores exceptions (in a finaliser, or the callback of a weak
    reference); the verb would then continue.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
