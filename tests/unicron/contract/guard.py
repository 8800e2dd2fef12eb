"""What may not happen at once in a process that aborts communicators, and how a broken rule ends the process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

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
    groups: Sequence[Any]

    def excludes(self, other: Running) -> bool:
        """Return whether one of the two is an abort that breaks a rule beside the other.

        Torch locks the map of a group's communicators, and each communicator, on its own. A collective uses the
        communicator outside of both locks, and the making of one changes the map without (ProcessGroupNCCL.cpp,
        ``collective``, ``initNCCLComm``, ``abortComms``): so neither may happen in a group that is being aborted. A
        survivor's process on a device crashed with a corrupted heap where one thread aborted and the other left the
        same groups and made new ones. A destruction and a second abort would wait for the locks, for as long as an
        abort takes: it is to be waited for before.
        """
        if self.thread == other.thread or "abort" not in (self.action, other.action):
            return False
        if {self.action, other.action} & {"issue", "make"}:
            return any(one is another for one in self.groups for another in other.groups)
        return True


class Guard:
    """The actions that are under way in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Running] = []

    @contextlib.contextmanager
    def during(self, action: Action, groups: Sequence[Any], what: str = "") -> Iterator[None]:
        """Be in an action; end the process if that breaks a rule.

        Args:
            action: which.
            groups: of which process groups.
            what: a collective or a communicator, for the report.
        """
        mine = Running(threading.get_ident(), action, groups)
        with self._lock:
            for other in reversed(self._running):
                if mine.excludes(other):
                    detail = f"{what} {list(groups)}; {list(other.groups)}"
                    end_process(f"{action} while another thread is in {other.action}", detail, other)
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
