"""Segments: closed parts of the log as files.

A segment is a file of rows, one a line as canonical JSON with all columns, from one position to another without a gap;
with the ending ``.gz`` it is compressed. Its manifest, ``<file>.manifest.json``, has its place in the chain and its
digest. The rows are those of the table, so their hash chain goes on from segment to segment and into the table.
``archive`` writes segments.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import Field, ValidationError
from pydantic_core import from_json

from shared.errors import Corrupt, NotFound
from shared.log.schema import COLUMNS, StoredRow
from shared.model import Model

ENDINGS = (".jsonl", ".jsonl.gz")
"""Endings of a segment's file."""

MANIFEST = ".manifest.json"
"""The ending that a manifest's name adds to that of its segment."""

_COLUMNS = set(COLUMNS)

_CHUNK_BYTES = 1 << 20
"""Number of bytes of a file that are read at once for its digest."""


class Manifest(Model):
    """What a segment has.

    ``previous_hash``: hash of the row before the first one. ``head``: hash of the last row. ``sha256``: digest of the
    file's bytes.
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
    """Return the segments in a folder, sorted by their names: names that ``archive`` gives sort by position."""
    return sorted(path for path in folder.iterdir() if is_segment(path) and not path.name.startswith("."))


def manifest_of(path: Path) -> Manifest:
    """Return the manifest of a segment.

    Raises:
        NotFound: the segment has none.
        Corrupt: it is none.
    """
    beside = path.with_name(path.name + MANIFEST)
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


def read_rows(path: Path) -> Iterator[StoredRow]:
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


def _opened(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _row(path: Path, number: int, line: bytes) -> StoredRow:
    try:
        row = from_json(line)
    except ValueError as err:
        raise Corrupt(f"{path}, line {number}: not JSON") from err
    if not isinstance(row, dict) or row.keys() != _COLUMNS:
        raise Corrupt(f"{path}, line {number}: not a row of a log, which has {', '.join(COLUMNS)}")
    return StoredRow(**row)
