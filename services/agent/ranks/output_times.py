"""Notes the sizes of ranks' output while they grow (``shared.machine.output_times``)."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from shared.machine.output_times import EVERY_S, line_of, note_of, times_path

_LAST_BYTES = 64
"""Bytes that are read from a file's end: more than the longest line has."""


class OutputTimes:
    """The notes of one node. Its method blocks, and is called in one thread at a time."""

    def __init__(self) -> None:
        self._noted: dict[Path, tuple[float, int]] = {}
        """The newest note of each output that grows or may grow."""

    def note(self, outputs: Iterable[Path], now_s: float) -> None:
        """Note the sizes that have changed, each at most once in ``EVERY_S``.

        Args:
            outputs: of the living processes.
            now_s: the present, in seconds since the epoch.
        """
        before, self._noted = self._noted, {}
        for output in outputs:
            try:
                size_bytes = os.stat(output, follow_symlinks=False).st_size
            except OSError:
                continue  # not made yet, or deleted
            last = before.get(output) or _newest(times_path(output))
            if size_bytes != last[1] and now_s - last[0] >= EVERY_S and _append(output, line_of(now_s, size_bytes)):
                last = now_s, size_bytes
            self._noted[output] = last


def _newest(path: Path) -> tuple[float, int]:
    """Return the newest note in a file, which an earlier agent may have written; if there is none, one of no output."""
    with contextlib.suppress(OSError), open(path, "rb", opener=_opener(os.O_RDONLY)) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        for line in reversed(file.read(_LAST_BYTES).splitlines()):
            if (note := note_of(line)) is not None:
                return note
    return 0.0, 0


def _append(output: Path, line: bytes) -> bool:
    """Append a line to the file beside an output; return whether it is there."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with contextlib.suppress(OSError), open(times_path(output), "ab", opener=_opener(flags)) as file:
        status = os.fstat(file.fileno())
        # The user's code may have put something else in the file's place.
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            file.write(line)
            return True
    return False


def _opener(flags: int) -> Callable[[str, int], int]:
    def opener(path: str, _: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)

    return opener
