"""Files that processes of a task make once for all others: whole and on the disk under their name, or not there at all.

A process may be killed at any time, and other processes, or its successor, read what it has left. So each set of files
is made beside its place and renamed when all of it has reached the disk. What a killed process left beside the place is
removed by the next one on the same machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from unicron.checkpoint import storage


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, made if missing, against the other processes of this machine that call this function."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder of files, under the lock of ``locked``.

    Where machines share the folder's parent without a common lock, each makes its own, and the first one stays.

    Args:
        folder: its path; nothing is there.
        make: writes the files into the empty folder that it is given.

    Raises:
        OSError: the files cannot be written.
    """
    beside = folder.with_name(f".{folder.name}.{socket.gethostname()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        make(beside)
        for path in (*beside.iterdir(), beside):
            storage.sync(path)
        with contextlib.suppress(FileExistsError):
            _rename(beside, folder)
        storage.sync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    """Rename a folder. ``FileExistsError``: there is a folder of that name with files in it."""
    try:
        source.rename(target)
    except OSError:
        if target.is_dir():
            raise FileExistsError(target) from None
        raise
