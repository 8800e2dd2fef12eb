"""When the output of a process had which size: a file beside the output, with a line for each time that was noted.

    <seconds since the epoch> <bytes>

Ranks write their output themselves, and put no time on its lines. So the agent notes the sizes while they grow, and
whoever asks for the output since a time gets it from the last size that was noted before then. That is earlier by up to
``EVERY_S`` and a look of the agent, and never later.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

EVERY_S = 5.0
"""Time between two notes while the output grows: a week of steady output is 120,000 lines, 3 MB."""

ENDING = ".times"
"""Suffix that is added to the name of the output."""

MOST_BYTES = 64 << 20
"""Most bytes that are read of such a file: those of months. The user's code may write there, too."""


def times_path(output: Path) -> Path:
    """Return the path of the file beside an output."""
    return output.with_name(output.name + ENDING)


def line_of(at_s: float, size_bytes: int) -> bytes:
    """Return the line of a note."""
    return f"{at_s:.3f} {size_bytes}\n".encode()


def note_of(line: bytes) -> tuple[float, int] | None:
    """Return the time and the size of a line; None if it is no note."""
    try:
        at_s, size_bytes = line.split()
        return float(at_s), int(size_bytes)
    except ValueError:
        return None


def size_at(lines: Iterable[bytes], since_s: float) -> int | None:
    """Return the size that output had at the last note up to a time; None where nothing is known of that time.

    The size is 0 if all output came later, or if the file was emptied since then.
    """
    size_bytes, known = 0, False
    for line in lines:
        note = note_of(line)
        if note is None:
            continue
        if note[0] <= since_s:
            size_bytes = note[1]
        elif note[1] < size_bytes:
            return 0
        known = True
    return size_bytes if known else None
