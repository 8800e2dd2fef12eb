"""The hash chain: the hash of a row, and the check of rows in order.

``log`` appends by it; ``scan`` checks what is in the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from pydantic_core import to_json

from shared.log.schema import COLUMNS
from shared.log.unreadable import Skipped
from shared.model import canonical_json

FIRST_HASH = "0" * 64
"""``previous_hash`` of the first row."""

_hashed = itemgetter(*(name for name in COLUMNS if name != "hash"))
"""The columns of a row that its hash covers, in the table's order."""


@dataclass(frozen=True, slots=True)
class ChainReport:
    """Result of ``EventLog.verify``.

    ``events``: number of rows, from the first on, that are intact. ``problem``: position and defect of the next row;
    empty if there is none. ``head``: hash of the last intact row. Rows cut off at the end leave a valid, shorter chain:
    compare ``head`` with an earlier one to notice that (``shared.log.anchors``). ``skipped``: what a newer version of
    the program wrote; the chain covers it, and no more can be said of it.
    """

    events: int
    ok: bool
    problem: str
    head: str = FIRST_HASH
    skipped: list[Skipped] = field(default_factory=list)


def row_hash(values: Mapping[str, Any]) -> str:
    """Return the hash of a row: SHA-256 over the canonical JSON of all its other columns, in the table's order."""
    return hashlib.sha256(canonical_json(_hashed(values)).encode()).hexdigest()


def has_its_hash(row: Mapping[str, Any]) -> bool:
    """Return whether a row's hash is that of its columns.

    ``to_json`` writes texts and integers as ``canonical_json`` does, in a third of the time. Where its hash is another
    one, or it cannot write the row, ``canonical_json`` decides.

    Raises:
        TypeError: a column has a value that JSON cannot have.
        ValueError: a column has a text that is not Unicode, or a number that is not finite.
    """
    if isinstance(row["data"], str):
        try:
            if hashlib.sha256(to_json(_hashed(row))).hexdigest() == row["hash"]:
                return True
        except ValueError:  # text that is not Unicode
            pass
    return bool(row["hash"] == row_hash(row))


class ChainCheck:
    """The check of a chain, row by row, with the place, hash, time and versions that the next row must continue.

    ``events`` and ``head`` stay at the last row before the first defect. The check itself goes on behind a defect as if
    the row were right, so that each defect is found once.
    """

    def __init__(self) -> None:
        self.events = 0
        self.head = FIRST_HASH
        self.ok = True
        self._position = 0
        self._hash = FIRST_HASH
        self._recorded_at = ""
        self._versions: dict[str, int] = {}

    def next(self, row: Mapping[str, Any]) -> str:
        """Return the row's defect in words; empty if it has none."""
        try:
            problem = self._problem(row)
        except (TypeError, ValueError) as err:
            problem = f"position {self._position + 1}: a column has a value that no event has ({err})"
        self._position = row["position"] if isinstance(row["position"], int) else self._position + 1
        self._hash = row["hash"]
        if isinstance(row["recorded_at"], str):
            self._recorded_at = row["recorded_at"]
        if isinstance(row["stream"], str) and isinstance(row["stream_version"], int):
            self._versions[row["stream"]] = row["stream_version"]
        return problem

    def intact(self, row: Mapping[str, Any]) -> None:
        """Count a row in which nothing is wrong; without effect behind the first defect."""
        if self.ok:
            self.events, self.head = row["position"], row["hash"]

    def broken(self) -> None:
        """Note that a row is wrong."""
        self.ok = False

    def _problem(self, row: Mapping[str, Any]) -> str:
        position, stream = self._position + 1, row["stream"]
        if row["position"] != position:
            return f"position {position} is missing: {row['position']!r} follows {self._position}"
        if row["previous_hash"] != self._hash:
            return f"position {position}: previous_hash is not the hash of the row before"
        if not has_its_hash(row):
            return f"position {position}: the row does not match its hash"
        version = self._versions.get(stream, 0) + 1
        if row["stream_version"] != version:
            return f"position {position}: version {row['stream_version']} of stream {stream}, expected {version}"
        if row["recorded_at"] < self._recorded_at:
            return f"position {position}: recorded before the row that precedes it"
        return ""
