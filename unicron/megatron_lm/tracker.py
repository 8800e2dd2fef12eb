"""Megatron-LM's tracker of its newest checkpoint: it is only moved to a complete checkpoint, and in one step.

Megatron-LM opens the tracker for writing, which empties it, and writes; a process that is killed in between leaves a
run without any checkpoint. Here the checkpoint is checked and synced first, and the tracker is written aside and
renamed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from unicron.errors import DamagedCheckpoint


class TrackerFile:
    """A tracker that is open for writing; it replaces the present one when it is closed without an error."""

    def __init__(self, path: Path, folder_of: Callable[[int], str]) -> None:
        """Prepare to move the tracker. ``folder_of``: returns a checkpoint's folder, given its iteration."""
        self._path, self._folder_of, self._text = path, folder_of, ""

    def write(self, text: str) -> None:
        """Take what Megatron-LM writes."""
        self._text += text

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Move the tracker.

        Raises:
            DamagedCheckpoint: the checkpoint is not complete; the tracker stays.
            OSError: it cannot be written.
        """
        if error is None:
            if self._text.isdecimal():
                sync(Path(self._folder_of(int(self._text))))
            replace_text(self._path, self._text)


def sync(folder: Path) -> None:
    """Have every file of a checkpoint on its device.

    Raises:
        DamagedCheckpoint: there is no checkpoint, or a file that its format requires is missing or empty.
    """
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    if not files:
        raise DamagedCheckpoint(f"{folder}: there is no checkpoint")
    metadata = folder / "metadata.json"
    if metadata.exists():  # Megatron-core's distributed formats
        # Until core 0.18, state that is not divided among ranks has a file of its own, which the metadata names.
        common = ("common.pt",) if b"common_backend" in metadata.read_bytes() else ()
        for name in (".metadata", "metadata.json", *common):
            if not (folder / name).is_file() or not (folder / name).stat().st_size:
                raise DamagedCheckpoint(f"{folder}: {name} is not there, or empty")
    for path in (*files, *{path.parent for path in files}, folder):
        sync_path(path)


def replace_text(path: Path, text: str) -> None:
    """Write a file aside, sync it and give it its name."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync_path(path.parent)


def names(path: Path, iteration: int) -> bool:
    """Return whether a tracker names the checkpoint of an iteration as the newest; if so, it was complete then."""
    return path.is_file() and path.read_text().strip() == str(iteration)


def put_aside(folder: Path) -> None:
    """Rename what a broken attempt has left of a checkpoint, so that the next one begins in an empty folder."""
    if folder.exists():
        # In front: an owner that deletes old checkpoints takes each ``iter_*`` for one.
        folder.rename(folder.with_name(f"unfinished-{folder.name}-{time.time_ns()}"))


def sync_path(path: Path) -> None:
    """Have a file or folder on its device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def opening(open_file: Callable[..., Any], is_tracker: Callable[[str], bool], folder_of: Callable[[int], str]) -> Any:
    """Return the function that replaces Megatron-LM's ``open_file``: a tracker that is opened for writing is moved.

    Args:
        open_file: Megatron-LM's.
        is_tracker: whether a path is that of a tracker.
        folder_of: returns a checkpoint's folder, given its iteration.
    """

    def open_(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and args[1] == "w" and is_tracker(str(args[0])):
            return TrackerFile(Path(args[0]), folder_of)
        return open_file(*args, **kwargs)

    return open_
