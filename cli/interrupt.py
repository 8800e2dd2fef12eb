"""Ctrl-C."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code: 128 + SIGINT, as shells do."""


def end_at_once() -> None:
    """Let Ctrl-C end the process wherever it is; for verbs that print, line by line, what never ends.

    The usual ``KeyboardInterrupt`` is lost when it strikes where Python ignores exceptions (a finaliser, a weak
    reference's callback); the verb would then follow on.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
