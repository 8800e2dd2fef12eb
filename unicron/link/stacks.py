"""The Python stacks of this process's threads, read by one of them while it has the GIL.

A signal handler that reads the stacks of other threads ends the process with SIGSEGV if one of them runs Python at that
moment (tests/unicron/test_stacks.py: after 40 to 900 requests, Python 3.11). While one thread has the GIL, no other
runs Python.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

MOST_CHARACTERS = 8 * 1024
"""See ``STACK_CHARACTERS`` in ``shared.events.evidence``."""


def of_other_threads() -> str:
    """Return the stacks of all threads but the calling one, the main thread's first, in ``faulthandler``'s form."""
    caller, main = threading.get_ident(), threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    blocks = [_text(thread, frame, is_first=thread == main) for thread, frame in frames if thread != caller]
    return "\n\n".join(blocks)[:MOST_CHARACTERS]


def _text(thread: int, frame: FrameType, *, is_first: bool) -> str:
    head = f"{'Current thread' if is_first else 'Thread'} 0x{thread:016x} (most recent call first):"
    calls = [
        f'  File "{one.f_code.co_filename}", line {line} in {one.f_code.co_name}'
        for one, line in traceback.walk_stack(frame)
    ]
    return "\n".join([head, *calls])
