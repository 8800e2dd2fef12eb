"""The hash chain: the hash of a row, and the check of rows in order.

``log`` appends by it; ``scan`` checks what is in the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from shared.log.base import FIRST_HASH as FIRST_HASH
from shared.log.base import START, Base
from shared.log.schema import COLUMNS, StoredRow
from shared.log.unreadable import Skipped
from shared.model import canonical_json

_HASHED = COLUMNS[:-1]
"""The columns of a row that its hash covers: all but the last, the hash."""


@dataclass(frozen=True, slots=True)
class ChainReport:
    """Result of ``EventLog.verify``.

    ``events``: number of rows, from the first on, that are intact. ``problem``: position and defect of the next row;
    empty if there is none. ``head``: hash of the last intact row. Rows cut off at the end leave a valid, shorter chain:
    compare ``head`` with an earlier one to notice that (``shared.log.anchors``). ``skipped``: what a newer version of
    the program wrote; the chain covers it, and nothing else can be checked. ``begins_after``: the table begins behind
    this position, up to which the log is archived; 0: it was never cut.
    """

    events: int
    ok: bool
    problem: str
    head: str = FIRST_HASH
    skipped: list[Skipped] = field(default_factory=list)
    begins_after: int = 0


def row_hash(values: Mapping[str, Any]) -> str:
    """Return the hash of a row: SHA-256 over the canonical JSON of all its other columns, in the table's order."""
    return _canonical_hash([values[name] for name in _HASHED])


def new_hash(columns: Sequence[str | int]) -> str:
    """Return the hash of a new row, given all its other columns in the table's order.

    ``to_json`` writes texts and integers as ``canonical_json`` does, in a third of the time.

    Raises:
        ValueError: a text is not Unicode.
    """
    return hashlib.sha256(to_json(columns)).hexdigest()


def has_its_hash(row: StoredRow) -> bool:
    """Return whether a row's hash is that of its columns.

    Where ``new_hash`` is another one, or the row cannot be a new one, ``canonical_json`` decides.

    Raises:
        TypeError: a column has a value that JSON cannot have.
        ValueError: a column has a text that is not Unicode, or a number that is not finite.
    """
    columns = row[:-1]
    if isinstance(row.data, str):
        try:
            if new_hash(columns) == row.hash:
                return True
        except ValueError:  # text that is not Unicode
            pass
    return bool(row.hash == _canonical_hash(columns))


def _canonical_hash(columns: Sequence[Any]) -> str:
    return hashlib.sha256(canonical_json(columns).encode()).hexdigest()


class ChainCheck:
    """The check of a chain, row by row, with the place, hash, time and versions that the next row must continue.

    ``position`` and ``head`` stay at the last row before the first defect. The check itself goes on behind a defect as
    if the row were right, so that each defect is found once.

    Args:
        base: the place that the first row must continue.
    """

    def __init__(self, base: Base = START) -> None:
        self.position = base.position
        self.head = base.hash
        self.ok = True
        self._position = base.position
        self._hash = base.hash
        self._recorded_at = base.recorded_at
        self._versions = dict(base.versions)

    @property
    def place(self) -> Base:
        """The place that the next row must continue."""
        return Base(self._position, self._hash, self._recorded_at, dict(self._versions))

    def next(self, row: StoredRow) -> str:
        """Return the row's defect in words; empty if it has none."""
        try:
            problem = self._problem(row)
        except (TypeError, ValueError) as err:
            problem = f"position {self._position + 1}: a column has a value that no event has ({err})"
        self._position = row.position if isinstance(row.position, int) else self._position + 1
        self._hash = row.hash
        if isinstance(row.recorded_at, str):
            self._recorded_at = row.recorded_at
        if isinstance(row.stream, str) and isinstance(row.stream_version, int):
            self._versions[row.stream] = row.stream_version
        return problem

    def intact(self, position: int, head: str) -> None:
        """Count a row in which nothing is wrong; without effect behind the first defect."""
        if self.ok:
            self.position, self.head = position, head

    def broken(self) -> None:
        """Note that a row is wrong."""
        self.ok = False

    def _problem(self, row: StoredRow) -> str:
        position, stream = self._position + 1, row.stream
        if row.position != position:
            return f"position {position} is missing: {row.position!r} follows {self._position}"
        if row.previous_hash != self._hash:
            return f"position {position}: previous_hash is not the hash of the row before"
        if not has_its_hash(row):
            return f"position {position}: the row does not match its hash"
        version = self._versions.get(stream, 0) + 1
        if row.stream_version != version:
            return f"position {position}: version {row.stream_version} of stream {stream}, expected {version}"
        if row.recorded_at < self._recorded_at:
            return f"position {position}: recorded before the row that precedes it"
        return ""
