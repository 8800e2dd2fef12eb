"""Segments: closed parts of the log as files, for archives.

A segment is a file of rows, one a line as canonical JSON with all columns, from one position to another without a gap;
with the ending ``.gz`` it is compressed. Its manifest, ``<file>.manifest.json``, has its place in the chain and its
digest. The rows are those of the table, so their hash chain goes on from segment to segment and into the table.

A segment counts as written once its manifest is there. That is renamed into place last: after the rows have been synced
to the disk, read back and compared.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field, ValidationError
from pydantic_core import from_json

from shared.durable_files import sync_folder
from shared.errors import Conflict, Corrupt, InvalidInput, NotFound
from shared.log.chain import ChainCheck
from shared.log.log import EventLog
from shared.log.scan import utc_text
from shared.log.schema import COLUMNS
from shared.model import Model, canonical_json

ENDINGS = (".jsonl", ".jsonl.gz")
"""Endings of a segment's file."""

_MANIFEST = ".manifest.json"

_COLUMNS = set(COLUMNS)

_DIGITS = 12
"""Digits of a position in a file's name: enough that names sort as positions do for a million events a day."""

_COMPRESSION = 6
"""zlib's usual level: 12,000 rows of ``benchmarks/log.py`` shrink to an eighth. The highest level takes 2.4 times as
long for 5% less."""

_CHUNK_BYTES = 1 << 20
"""Bytes of a file that are read at once for its digest."""


class Manifest(Model):
    """What a segment has.

    ``previous_hash``: of the row before the first one. ``head``: hash of the last row. ``sha256``: of the file's bytes.
    """

    format: Literal["unicron-log-segment"] = "unicron-log-segment"
    version: Literal[1] = 1
    file: str
    first_position: int = Field(ge=1)
    last_position: int = Field(ge=1)
    events: int = Field(ge=1)
    previous_hash: str
    head: str
    first_recorded_at: str
    last_recorded_at: str
    sha256: str
    size_bytes: int


def is_segment(path: Path) -> bool:
    """Return whether a path is that of a segment, by its ending."""
    return path.name.endswith(ENDINGS)


def segments_in(folder: Path) -> list[Path]:
    """Return the segments in a folder, by their names: those that ``archive`` gives sort by position."""
    return sorted(path for path in folder.iterdir() if is_segment(path) and not path.name.startswith("."))


def manifest_of(path: Path) -> Manifest:
    """Return the manifest of a segment.

    Raises:
        NotFound: the segment has none.
        Corrupt: it is none.
    """
    beside = path.with_name(path.name + _MANIFEST)
    try:
        return Manifest.model_validate_json(beside.read_bytes())
    except FileNotFoundError as err:
        raise NotFound(f"segment {path} has no manifest, {beside.name}") from err
    except (ValidationError, OSError) as err:
        raise Corrupt(f"{beside} is not the manifest of a segment") from err


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a segment, as they are there.

    Raises:
        NotFound: there is no such file.
        Corrupt: a line is no row, or the file cannot be read to its end.
    """
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                yield _row(path, number, line)
    except FileNotFoundError as err:
        raise NotFound(f"no segment at {path}") from err
    except (OSError, EOFError, zlib.error) as err:  # gzip.BadGzipFile is an OSError
        raise Corrupt(f"{path} cannot be read behind line {number}: {err}") from err


def archive(log: EventLog, folder: Path, before: int | datetime, ending: str = ENDINGS[1]) -> Manifest | None:
    """Write the rows of a log that are not in a folder of segments yet as one more segment. The log stays as it is.

    Args:
        log: the log. All its rows up to the end of the segment are checked as they are read.
        folder: of the segments; is made if there is none.
        before: the first position that stays out, or the time from which on what was recorded does.
        ending: of the file: ``.jsonl`` or ``.jsonl.gz``.

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
    with _locked(folder):
        earlier = [manifest_of(path) for path in segments_in(folder)]
        last = max(earlier, key=lambda manifest: manifest.last_position, default=None)
        partial = folder / f".partial{ending}"
        with closing(log.rows()) as stored:
            rows = _closed_rows(stored, before, last)
            if (first := next(rows, None)) is None:
                return None
            try:
                return _published(partial, _written(partial, itertools.chain([first], rows)), ending)
            finally:
                partial.unlink(missing_ok=True)


class _Contents:
    """The rows of a segment as they pass: their digest, their number, the first and the last."""

    def __init__(self) -> None:
        self.number = 0
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self._digest = hashlib.sha256()

    def line(self, row: dict[str, Any]) -> bytes:
        """Count a row; return its line."""
        line = f"{canonical_json(row)}\n".encode()
        self._digest.update(line)
        self.number += 1
        self.first = self.first or row
        self.last = row
        return line

    def is_as(self, other: _Contents) -> bool:
        """Return whether two files have the same rows."""
        return (self.number, self._digest.digest()) == (other.number, other._digest.digest())


def _closed_rows(
    stored: Iterable[dict[str, Any]], before: int | datetime, last: Manifest | None
) -> Iterator[dict[str, Any]]:
    """Yield the rows that are to be written: behind the last segment, and before the end that was asked for."""
    behind = last.last_position if last is not None else 0
    end = utc_text(before) if isinstance(before, datetime) else None
    check = ChainCheck()
    position = 0
    for row in stored:
        if problem := check.next(row):
            raise Corrupt(f"{problem}; nothing was archived")
        if last is not None and row["position"] == behind and row["hash"] != last.head:
            raise Corrupt(f"position {behind}: the hash is not that of the segment {last.file}, {last.head}")
        if row["recorded_at"] >= end if end is not None else row["position"] >= before:
            return
        position = row["position"]
        if position > behind:
            yield row
    if position < behind:
        raise Corrupt(f"the log ends at position {position}, the segments at {behind}: they are of another log")


def _written(path: Path, rows: Iterable[dict[str, Any]]) -> _Contents:
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
    if not there.is_as(written):
        raise Corrupt(f"{partial} does not read as it was written; nothing was archived")
    first, last = there.first, there.last
    name = f"log-{first['position']:0{_DIGITS}d}-{last['position']:0{_DIGITS}d}{ending}"
    manifest = Manifest(
        file=name,
        first_position=first["position"],
        last_position=last["position"],
        events=there.number,
        previous_hash=first["previous_hash"],
        head=last["hash"],
        first_recorded_at=first["recorded_at"],
        last_recorded_at=last["recorded_at"],
        sha256=file_sha256(partial),
        size_bytes=partial.stat().st_size,
    )
    folder = partial.parent
    beside = folder / f".partial{_MANIFEST}"
    with beside.open("w") as file:
        file.write(f"{manifest.model_dump_json(indent=2)}\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / name)
    beside.rename(folder / f"{name}{_MANIFEST}")
    sync_folder(folder)
    return manifest


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
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


def _opened(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = from_json(line)
    except ValueError as err:
        raise Corrupt(f"{path}, line {number}: not JSON") from err
    if not isinstance(row, dict) or row.keys() != _COLUMNS:
        raise Corrupt(f"{path}, line {number}: not a row of a log, which has {', '.join(COLUMNS)}")
    return row
