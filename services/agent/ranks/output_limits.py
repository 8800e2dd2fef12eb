"""Limits the output of ranks on the disk: how much of each process, and of how many processes of a worker.

A rank writes to its file itself, so that its output survives agents and costs it no process in between. Output beyond
the limit is freed at the file's beginning (a hole, fallocate(2)): sizes and offsets stay as they are, nobody has to
open another file, and who follows the output goes on. The first of these limits is kept up to what a rank writes in
``LOOK_S``.

The sizes of ranks' output are noted while they grow (``shared.machine.output_times``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path

from services.agent.node.process import Process
from shared.machine.output_times import EVERY_S, line_of, note_of, times_path
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Time between two looks at the sizes, one system call each. A rank that writes 1 GB/s has some
hundred megabytes beyond the limit until the next look has freed them."""

MOST_BYTES = 1 << 40
"""Size from which a file is emptied: ext4 has no files above 16 TiB, and refuses to write beyond that."""

LEFT_OUT = "output_left_out_bytes"
"""Name of the counter of bytes that were freed."""

_BLOCK_BYTES = 4096
"""The freed part of a file ends at a multiple of this: bytes of a part of a block would only become zeros."""

_SECTOR_BYTES = 512
"""Unit of ``st_blocks`` (stat(2))."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Flags of ``fallocate`` (linux/falloc.h)."""

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of a file system that makes no holes (NFS before 4.2)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


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


class OutputLimits:
    """Keeps the limits of one node.

    Args:
        settings: ``rank_output_bytes``, ``rank_output_files``.
        counters: the agent's; ``LEFT_OUT`` is among them from the first freed byte on.
    """

    def __init__(self, settings: Settings, counters: MutableMapping[str, int]) -> None:
        self._most_bytes, self._most_files = settings.rank_output_bytes, settings.rank_output_files
        self._counters = counters
        self._times = OutputTimes()
        self._begun: frozenset[str] = frozenset()
        """Ids of the living processes, for which older output was deleted already."""

    async def keep(self, processes: Callable[[], Iterable[Process]]) -> None:
        """Keep the limits until cancelled. ``processes``: returns the living ones."""
        while True:
            output = {process.id: Path(process.output) for process in processes() if process.output}
            # In a thread: a file system that does not answer delays no heartbeat.
            if freed_bytes := await asyncio.to_thread(self._look, output):
                self._counters[LEFT_OUT] = self._counters.get(LEFT_OUT, 0) + freed_bytes
            self._begun = frozenset(output)
            await asyncio.sleep(LOOK_S)

    def _look(self, output: Mapping[str, Path]) -> int:
        """Keep the limits at this moment, and note the sizes; return how many bytes of the output were freed."""
        if self._most_files:
            for path in (path for process, path in output.items() if process not in self._begun):
                _delete_older(path, self._most_files)
        self._times.note(output.values(), time.time())
        return sum(_free_beyond(path, self._most_bytes) for path in output.values()) if self._most_bytes else 0


def _free_beyond(path: Path, most_bytes: int) -> int:
    """Free the older part of a file that has more on the disk, so that half of it stays; return the freed bytes."""
    try:
        if os.stat(path, follow_symlinks=False).st_blocks * _SECTOR_BYTES <= most_bytes:
            return 0
        # The user's code may have put a link or a pipe in the file's place.
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return 0  # not made yet, deleted, or no file
    try:
        status = os.fstat(descriptor)
        return _free_up_to(descriptor, status.st_size, most_bytes // 2) if stat.S_ISREG(status.st_mode) else 0
    except OSError as err:
        logger.warning("the output %s cannot be limited: %s", path, err.strerror)
        return 0
    finally:
        os.close(descriptor)


def _free_up_to(descriptor: int, size_bytes: int, kept_bytes: int) -> int:
    """Free all of a file but its newest bytes; all, if the file system makes no holes or the file is too large.

    A rank appends (O_APPEND): it writes to the beginning of a file that was emptied.

    Returns:
        How many bytes were freed.

    Raises:
        OSError: the file system does neither.
    """
    end = size_bytes - kept_bytes
    end -= end % _BLOCK_BYTES
    begin = _first_data(descriptor)
    if size_bytes < MOST_BYTES:
        if end <= begin:
            return 0
        if _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, end) == 0:
            return end - begin
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))
    os.ftruncate(descriptor, 0)
    return size_bytes - begin


def _first_data(descriptor: int) -> int:
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:
        return 0  # the file system knows no holes


def _delete_older(path: Path, most_files: int) -> None:
    """Delete the output of a worker's processes before the newest few. ``path``: the newest one's."""
    _, _, worker = path.name.partition("-")
    pattern = re.compile(rf"(\d+)-{re.escape(worker)}")
    with contextlib.suppress(OSError):
        names = os.listdir(path.parent)
        found = sorted((int(match[1]), match[0]) for name in names if (match := pattern.fullmatch(name)))
        for _, name in [one for one in found if one[1] != path.name][: max(0, len(found) - most_files)]:
            (path.parent / name).unlink(missing_ok=True)
            times_path(path.parent / name).unlink(missing_ok=True)
