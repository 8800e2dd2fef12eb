"""Writing segments: the events that a log has and a folder of segments lacks become one more segment.

A segment counts as written once its manifest is there. The manifest is renamed into place last: after the rows have
been synced to the disk, read back and compared. ``segments`` has the format, and reads.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

from shared.errors import Conflict, Corrupt, InvalidInput
from shared.log.base import Base
from shared.log.chain import ChainCheck
from shared.log.log import EventLog
from shared.log.scan import utc_text
from shared.log.schema import StoredRow
from shared.log.segments import ENDINGS, MANIFEST, Manifest, file_sha256, manifest_of, read_rows, segments_in
from shared.machine.durable_files import sync_folder
from shared.model import canonical_json

_DIGITS = 12
"""Digits of a position in a file's name: enough that names sort as positions do for a million events a day."""

_COMPRESSION = 6
"""zlib's usual level: 12,000 rows of ``benchmarks/log.py`` shrink to an eighth. The highest level takes 2.4 times as
long for 5% less."""


Watch = Callable[[Iterable[StoredRow]], Iterable[StoredRow]]
"""Wraps the rows of a pass, for programs that show how far it has come."""


def unwatched(rows: Iterable[StoredRow]) -> Iterable[StoredRow]:
    """Return the rows as they are (``Watch``)."""
    return rows


def archive(
    log: EventLog, folder: Path, before: int | datetime, ending: str = ENDINGS[1], watch: Watch = unwatched
) -> Manifest | None:
    """Write the rows of a log that are not in a folder of segments yet as one more segment. The log stays as it is.

    Args:
        log: the log. All rows of its table up to the end of the segment are checked as they are read.
        folder: the folder of the segments, which is made if there is none.
        before: the first position that stays out, or the time from which on recorded events stay out.
        ending: the file's ending: ``.jsonl`` or ``.jsonl.gz``.
        watch: wraps the rows as they are read.

    Returns:
        The manifest; None if there is nothing to write.

    Raises:
        Corrupt: a row is wrong, the log is not the one of the folder's segments, or what was written reads otherwise.
        Conflict: another program writes the same segment.
        InvalidInput: another ending.
    """
    if ending not in ENDINGS:
        raise InvalidInput(f"ending {ending!r} of a segment; allowed: {', '.join(ENDINGS)}")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), closing(log.rows()) as stored:
        return add_segment(folder, log.base, watch(stored), before, ending)


def add_segment(
    folder: Path, base: Base, stored: Iterable[StoredRow], before: int | datetime | None, ending: str
) -> Manifest | None:
    """Write those of a log's rows that a folder has not as one more segment; the folder is locked.

    Args:
        folder: the folder of the segments.
        base: the place behind which the rows begin.
        stored: the rows of the log from there on.
        before: as of ``archive``; None: all rows are written.
        ending: as of ``archive``.

    Returns:
        The manifest; None if there is nothing to write.

    Raises:
        Corrupt: as ``archive``.
    """
    rows = _closed_rows(base, stored, before, last_segment(folder))
    if (first := next(rows, None)) is None:
        return None
    partial = folder / f".partial{ending}"
    try:
        return _published(partial, _written(partial, itertools.chain([first], rows)), ending)
    finally:
        partial.unlink(missing_ok=True)


def last_segment(folder: Path) -> Manifest | None:
    """Return the manifest of the last segment in a folder; None if it has none."""
    found = [manifest_of(path) for path in segments_in(folder)]
    return max(found, key=lambda manifest: manifest.last_position, default=None)


class _Contents:
    """The rows of a segment as they pass: their digest, their number, the first and the last."""

    def __init__(self) -> None:
        self.number = 0
        self.first: StoredRow | None = None
        self.last: StoredRow | None = None
        self._digest = hashlib.sha256()

    def line(self, row: StoredRow) -> bytes:
        """Count a row; return its line."""
        line = f"{canonical_json(row._asdict())}\n".encode()
        self._digest.update(line)
        self.number += 1
        self.first = row if self.first is None else self.first
        self.last = row
        return line

    def is_as(self, other: _Contents) -> bool:
        """Return whether two files have the same rows."""
        return (self.number, self._digest.digest()) == (other.number, other._digest.digest())


def _is_behind(row: StoredRow, end: int | str | None) -> bool:
    """Return whether a row is at or behind an end: a position, or a time as the log writes it; None: there is none."""
    if end is None:
        return False
    return bool(row.position >= end if isinstance(end, int) else row.recorded_at >= end)


def _closed_rows(
    base: Base, stored: Iterable[StoredRow], before: int | datetime | None, last: Manifest | None
) -> Iterator[StoredRow]:
    """Yield the rows that are to be written: behind the last segment, and before the end, if one was asked for."""
    behind = last.last_position if last is not None else 0
    if behind < base.position:
        raise Corrupt(f"the segments end at position {behind}, and the log begins behind {base.position}")
    if last is not None and behind == base.position and last.head != base.hash:
        raise Corrupt(f"position {behind}: the log does not begin behind the segment {last.file}")
    end = utc_text(before) if isinstance(before, datetime) else before
    check = ChainCheck(base)
    position = base.position
    for row in stored:
        if problem := check.next(row):
            raise Corrupt(f"{problem}; nothing was archived")
        if last is not None and row.position == behind and row.hash != last.head:
            raise Corrupt(f"position {behind}: the hash is not that of the segment {last.file}, {last.head}")
        if _is_behind(row, end):
            return
        position = row.position
        if position > behind:
            yield row
    if position < behind:
        raise Corrupt(f"the log ends at position {position}, the segments at {behind}: they are of another log")


def _written(path: Path, rows: Iterable[StoredRow]) -> _Contents:
    """Write rows to a file; they are on the disk when this returns."""
    contents = _Contents()
    with path.open("wb") as file:
        if path.name.endswith(".gz"):
            # No name and no time in the header: the same rows make the same file.
            with gzip.GzipFile("", "wb", _COMPRESSION, file, mtime=0) as compressed:
                compressed.writelines(map(contents.line, rows))
        else:
            file.writelines(map(contents.line, rows))
        file.flush()
        os.fsync(file.fileno())
    return contents


def _published(partial: Path, written: _Contents, ending: str) -> Manifest:
    """Read a segment back, and give it its name and its manifest.

    Raises:
        Corrupt: the file does not have what was written.
    """
    there = _Contents()
    for row in read_rows(partial):
        there.line(row)
    first, last = there.first, there.last
    if first is None or last is None or not there.is_as(written):
        raise Corrupt(f"{partial} does not read as it was written; nothing was archived")
    name = f"log-{first.position:0{_DIGITS}d}-{last.position:0{_DIGITS}d}{ending}"
    manifest = Manifest(
        file=name,
        first_position=first.position,
        last_position=last.position,
        events=there.number,
        previous_hash=first.previous_hash,
        head=last.hash,
        first_recorded_at=first.recorded_at,
        last_recorded_at=last.recorded_at,
        sha256=file_sha256(partial),
        size_bytes=partial.stat().st_size,
    )
    folder = partial.parent
    beside = folder / f".partial{MANIFEST}"
    with beside.open("w") as file:
        file.write(f"{manifest.model_dump_json(indent=2)}\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / name)
    beside.rename(folder / f"{name}{MANIFEST}")
    sync_folder(folder)
    return manifest


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other programs from adding segments; the lock of a program that is killed goes with it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise Conflict(f"another program archives to {folder}") from err
        yield
    finally:
        os.close(descriptor)
