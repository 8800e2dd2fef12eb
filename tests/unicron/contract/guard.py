"""What may not happen at once in a process that aborts communicators, and how a broken rule ends the process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn

EXIT_BROKEN_RULE = 86
"""Exit code of a process that broke a rule. On a device it would have crashed, hung or trained on garbage."""

BROKEN_RULE = "contract: broken rule: "
"""Begins what such a process prints last."""

Action = Literal["issue", "make", "destroy", "abort"]


@dataclass(frozen=True, slots=True)
class Running:
    """An action that a thread is in."""

    thread: int
    action: Action
    what: str


class Guard:
    """The actions that are under way in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Running] = []

    @contextlib.contextmanager
    def during(self, action: Action, what: str) -> Iterator[None]:
        """Be in an action; end the process if it meets an abort of another thread, or is one and meets an action.

        Torch locks the map of a group's communicators, and each communicator, on its own; NCCL locks nothing
        (nccl.h: one thread per communicator). A survivor's process on a device crashed with a corrupted heap where one
        thread aborted and the other left the same groups and made new ones.
        """
        mine = Running(threading.get_ident(), action, what)
        with self._lock:
            for other in reversed(self._running):
                if other.thread != mine.thread and "abort" in (other.action, action):
                    end_process(f"{action} while another thread is in {other.action}", f"{what}; {other.what}", other)
            self._running.append(mine)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(mine)


def end_process(rule: str, detail: str, *others: Running) -> NoReturn:
    """Print which rule is broken and what the threads concerned are at, and end the process.

    Args:
        rule: its name.
        detail: who or what broke it.
        others: of other threads, beside the calling one.
    """
    frames = sys._current_frames()
    lines = [f"{BROKEN_RULE}{rule} ({detail})\n"]
    for thread in (threading.get_ident(), *(other.thread for other in others)):
        name = next((t.name for t in threading.enumerate() if t.ident == thread), str(thread))
        lines.append(f"contract: thread {name}:\n")
        if thread in frames:
            lines += traceback.format_stack(frames[thread])
    # One write: other processes may share the file, and nothing of the report may be lost.
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, "".join(lines).encode())
    os._exit(EXIT_BROKEN_RULE)
