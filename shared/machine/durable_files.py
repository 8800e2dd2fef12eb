"""Files that are there whole or not at all, also after a power failure."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, *parts: bytes, mode: int) -> None:
    """Write a file in place of the one of its name; it is on the disk when this returns.

    Args:
        path: the file's path; its folder is made if it is missing.
        parts: the contents, one part after the other.
        mode: who may read and write it; nobody else may at any time.

    Raises:
        OSError: it cannot be written; the earlier file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names of the files in a folder on the disk.

    Raises:
        OSError: the file system cannot do it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
