"""The work of a function, counted: what does not depend on the machine's speed, so that a test can say what grows.

Loops within C code (the copy of a dictionary, a sort without a key) count as one instruction; a copy shows in bytes.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(work: Callable[[], object]) -> int:
    """Return how many instructions a call takes, with all that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def peak_bytes(work: Callable[[], object]) -> int:
    """Return how many bytes a call has allocated at most at the same time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
