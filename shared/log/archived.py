"""The archived rows of a log that was cut over, as services read them: from the segments before its table.

    archived.page(after, limit)   a page of rows, as of the table
    archived.rows(after)          all of them

Services fold the log a page at a time, some at two places at once. So the places up to which segments have been read
are kept, and a page goes on from the nearest before it. ``log`` reads by this module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from shared.errors import Archived, Corrupt, NotFound
from shared.log.base import START, Base
from shared.log.chain import ChainCheck
from shared.log.schema import StoredRow
from shared.log.segments import Manifest, file_sha256, manifest_of, read_rows, segments_in

MOST_CURSORS = 4
"""Most places at which segments are read on: a follower's, that of the answers it looks up ahead, and those of two
requests to the api. Each is an open file."""


class _Cursor:
    """Rows that are read on from page to page. ``last``: the row that was read last."""

    def __init__(self, rows: Iterator[StoredRow]) -> None:
        self.last: StoredRow | None = None
        self._rows = rows

    def next(self) -> StoredRow | None:
        """Return the next row; None at the end."""
        row = next(self._rows, None)
        self.last = row if row is not None else self.last
        return row


class ArchivedRows:
    """The rows up to a base, from the segments in a folder; safe to use from threads.

    Args:
        base: the place up to which they are read; a log that was never cut has none.
        folder: the folder of the segments; None: the one that the base names.
    """

    def __init__(self, base: Base, folder: Path | None = None) -> None:
        self._base = base
        self._folder = folder if folder is not None else Path(base.segments)
        self._segments: list[Manifest] = []
        self._checked: set[str] = set()
        """Files whose digest was compared."""
        self._cursors: list[_Cursor] = []
        """The cursors; the one that was used last is at the end."""
        self._lock = threading.Lock()

    def rows(self, after: int = 0) -> Iterator[StoredRow]:
        """Yield the rows behind a position, in order.

        Raises:
            Archived: a segment is not there.
            Corrupt: a segment was changed, or is of another log.
        """
        if after < self._base.position:
            first = self._segment_with(after + 1)
            yield from (row for row in self._rows_from(first) if row.position > after)

    def page(self, after: int, limit: int, types: Sequence[str] = ()) -> list[StoredRow]:
        """Return the rows behind a position, at most ``limit``, of some types if any are named; raises as ``rows``."""
        after = max(after, 0)
        if after >= self._base.position or limit <= 0:
            return []
        with self._lock:
            cursor = self._cursor_at(after)
            found: list[StoredRow] = []
            row = cursor.last
            try:
                while len(found) < limit:
                    if row is not None and row.position > after and (not types or row.type in types):
                        found.append(row)
                        if len(found) == limit:
                            break
                    if (row := cursor.next()) is None:
                        break
            except BaseException:
                self._cursors.remove(cursor)
                raise
            return found

    def _cursor_at(self, after: int) -> _Cursor:
        """Return the nearest cursor that has not passed the row behind a position."""
        segment = self._segment_with(after + 1)
        nearest = self._manifests()[segment].first_position - 1  # where the segment itself begins
        found = None
        for cursor in self._cursors:
            if cursor.last is not None and nearest <= cursor.last.position <= after + 1:
                found, nearest = cursor, cursor.last.position
        if found is None:
            found = _Cursor(self._rows_from(segment))
        self._cursors = [*(cursor for cursor in self._cursors if cursor is not found), found][-MOST_CURSORS:]
        return found

    def _segment_with(self, position: int) -> int:
        """Return the index of the segment that has a position."""
        manifests = self._manifests()
        return next(index for index, manifest in enumerate(manifests) if position <= manifest.last_position)

    def _rows_from(self, first: int) -> Iterator[StoredRow]:
        """Yield the rows of a segment and of those behind it, up to the base."""
        manifests = self._manifests()
        position = manifests[first].first_position - 1
        for manifest in manifests[first:]:
            self._compare(manifest)
            for row in read_rows(self._folder / manifest.file):
                position += 1
                if row.position != position:
                    raise Corrupt(f"{manifest.file} does not have position {position}")
                if position == self._base.position and row.hash != self._base.hash:
                    raise Corrupt(f"{manifest.file}: position {position} is not the event behind which the log begins")
                yield row
                if position == self._base.position:
                    return

    def _manifests(self) -> list[Manifest]:
        if not self._segments:
            self._segments = manifests_up_to(self._folder, self._base.position)
        return self._segments

    def _compare(self, manifest: Manifest) -> None:
        """Compare a file with its manifest, once."""
        if manifest.file not in self._checked:
            compare(self._folder, manifest)
            self._checked.add(manifest.file)


def manifests_up_to(folder: Path, position: int) -> list[Manifest]:
    """Return the manifests of the segments in a folder, which must have all positions from 1 to another one.

    Raises:
        Archived: there are none that have.
        Corrupt: they do not continue one another.
    """
    help_ = "UNICRON_LOG_SEGMENTS names the folder of the segments, which services read at their start"
    try:
        found = [manifest_of(path) for path in segments_in(folder)]
    except FileNotFoundError as err:
        raise Archived(
            f"the log up to position {position} was archived, and there is no folder {folder}: {help_}"
        ) from err
    except NotFound as err:
        raise Archived(f"the log up to position {position} was archived: {err.detail}: {help_}") from err
    found.sort(key=lambda manifest: manifest.first_position)
    needed = [manifest for manifest in found if manifest.first_position <= position]
    behind = 0
    for manifest in needed:
        if manifest.first_position != behind + 1:
            break
        behind = manifest.last_position
    if behind < position:
        missing = f"the segment with position {behind + 1} is not in {folder}"
        raise Archived(f"the log up to position {position} was archived, and {missing}: {help_}")
    for one, two in pairwise(needed):
        if two.previous_hash != one.head:
            raise Corrupt(f"{two.file} does not continue the hash chain of {one.file}")
    return needed


def compare(folder: Path, manifest: Manifest) -> None:
    """Compare a segment with its manifest.

    Raises:
        Archived: there is no such file.
        Corrupt: it was changed.
    """
    try:
        found = file_sha256(folder / manifest.file)
    except FileNotFoundError as err:
        raise Archived(f"segment {folder / manifest.file} is not there") from err
    if found != manifest.sha256:
        raise Corrupt(f"segment {folder / manifest.file} was changed: its SHA-256 is not that of its manifest")


def verified_base(folder: Path, position: int) -> Base:
    """Read segments back from position 1 on, check them, and return the place at a position.

    Raises:
        Archived: a segment is not there.
        Corrupt: a segment was changed, or a row is wrong.
    """
    check = ChainCheck(START)
    for manifest in manifests_up_to(folder, position):
        compare(folder, manifest)
        for row in read_rows(folder / manifest.file):
            if problem := check.next(row):
                raise Corrupt(f"{manifest.file}: {problem}")
            if row.position == position:
                return check.place._replace(segments=str(folder.resolve()))
    raise Archived(f"no segment in {folder} has position {position}")
