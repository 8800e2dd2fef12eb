"""Standard output and error of a training process, which never fail: what finds no room on the disk is left out.

A node's disk fills up, above all with the output of its ranks. An error of ``print`` would end a rank that has all that
it needs to train on. So text is dropped while there is no room, and a line says how much once there is some again.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write for which there is no room: a full file system, a quota, a file that cannot be larger."""


class LenientOutput(io.RawIOBase):
    """A file to write to, whose writes succeed without room too.

    Args:
        descriptor: the file's, which stays open.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._dropped_bytes = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def write(self, data: Any, /) -> int:
        """Write a part of the data, or drop all of it; return how many bytes are done with.

        Args:
            data: bytes, or what has the buffer interface.

        Raises:
            OSError: the file cannot be written for another reason.
        """
        try:
            self._note_dropped()
            return os.write(self._descriptor, data)
        except OSError as err:
            if err.errno not in NO_ROOM:
                raise
            self._dropped_bytes += len(data)
            return len(data)

    def _note_dropped(self) -> None:
        """Say how much was dropped; if there is no room for that either, it is said later."""
        if self._dropped_bytes:
            os.write(
                self._descriptor, f"\nunicron: {self._dropped_bytes} bytes of output are left out: no room\n".encode()
            )
            self._dropped_bytes = 0


def protect() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` of this process write to descriptors 1 and 2 in this way, line by line."""
    sys.stdout, sys.stderr = _text(1, "strict"), _text(2, "backslashreplace")


def _text(descriptor: int, errors: str) -> io.TextIOWrapper:
    """Return a text file with the encoding errors that Python's own has (documentation of ``sys.stdout``)."""
    raw = io.BufferedWriter(LenientOutput(descriptor))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)
