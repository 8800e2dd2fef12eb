"""Archived logs as a source of replay: the segments' files in order, and the live log behind them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from services.planner.replay.sources import ANSWER_TYPES, Answer, answer_of, doubled, table_defects
from shared.errors import Corrupt, NotFound
from shared.log.anchors import Defect
from shared.log.base import START, Base
from shared.log.chain import ChainCheck
from shared.log.log import EventLog
from shared.log.scan import Row, Scan
from shared.log.schema import StoredRow
from shared.log.segments import Manifest, file_sha256, manifest_of, read_rows


class SegmentsSource:
    """Segments and a live log as one log, in the order given.

    The live log may have rows of the segments too; of these, the segments' count. A live log that was cut over has to
    begin where the segments say.

    Args:
        segments: files, by position.
        opened: returns the live log, opened anew for each pass, which closes it; None: there are segments alone.
        last: position of the live log's last row that counts; None: all count.
    """

    def __init__(
        self, segments: Sequence[Path], opened: Callable[[], EventLog] | None = None, last: int | None = None
    ) -> None:
        self._segments = list(segments)
        self._opened = opened
        self._last = last

    def base(self) -> Base:
        """Return the start of the log."""
        return START

    def answers(self) -> Iterator[Answer]:
        """Yield the events of the types with which the planner answers, in order."""
        try:
            for row in self._stored():
                if row.type not in ANSWER_TYPES:
                    continue
                if (answer := answer_of(row.position, row.event_id, row.data)) is not None:
                    yield answer
        except Corrupt:
            return  # the pass over the rows names what is wrong

    def rows(self, scan: Scan) -> Iterator[Row]:
        """Yield every row.

        Raises:
            Corrupt: a segment or the database is damaged.
        """
        yield from scan.rows(self._stored())

    def as_it_is(self) -> SegmentsSource:
        """Return the log as it is now, without what is appended later."""
        if self._opened is None:
            return self
        try:
            with closing(self._opened()) as log:
                return SegmentsSource(self._segments, self._opened, log.last_position())
        except (Corrupt, ValueError):
            return self  # the pass over the rows says where the defect is

    def defects(self) -> list[Defect]:
        """Return what is wrong with segments as files, with the live table, and which event ids several rows have."""
        found = [defect for path in self._segments for defect in _file_defects(path)]
        found += self._gaps()
        if self._opened is not None:
            with closing(self._opened()) as log:
                found += table_defects(log)
                found += self._base_defects(log.base)
        try:
            found += self._doubled()
        except Corrupt:
            pass  # the pass over the rows names what is wrong
        return found

    def _stored(self) -> Iterator[StoredRow]:
        """Yield the rows of all parts, as they are stored."""
        last: Any = 0  # a damaged row may have any value there
        for path in self._segments:
            for row in read_rows(path):
                yield row
                last = row.position
        if self._opened is None:
            return
        with closing(self._opened()) as log, closing(log.rows()) as rows:
            for row in rows:
                if self._last is not None and isinstance(row.position, int) and row.position > self._last:
                    return
                if not isinstance(last, int) or row.position > last:
                    yield row

    def _gaps(self) -> Iterator[Defect]:
        """Yield where segments do not follow one another, by their manifests."""
        manifests = [found for path in self._segments if (found := _manifest(path)) is not None]
        if manifests and manifests[0].first_position != 1:
            missing = manifests[0].first_position - 1
            yield Defect(1, f"positions 1 to {missing}: no segment before {manifests[0].file} was given")
        for one, two in pairwise(manifests):
            between = f"between {one.file} and {two.file}"
            if two.first_position > one.last_position + 1:
                places = f"positions {one.last_position + 1} to {two.first_position - 1}"
                yield Defect(one.last_position + 1, f"{places}: a segment {between} is missing")
            elif two.first_position <= one.last_position:
                places = f"positions {two.first_position} to {min(one.last_position, two.last_position)}"
                yield Defect(two.first_position, f"{places} are in {one.file} and again in {two.file}")
            elif two.previous_hash != one.head:
                what = f"{two.file} does not continue the hash chain of {one.file}"
                yield Defect(two.first_position, f"position {two.first_position}: {what}")

    def _base_defects(self, base: Base) -> Iterator[Defect]:
        """Yield where the live log begins at another place than the one that the segments have."""
        if not base.is_cut:
            return
        check = ChainCheck()
        try:
            for path in self._segments:
                for row in read_rows(path):
                    check.next(row)
                    if row.position == base.position:
                        yield from _differences(base, check.place)
                        return
        except Corrupt:
            return  # the pass over the rows names what is wrong
        what = f"position {base.position}: the live log begins behind it, and no segment that was given has it"
        yield Defect(base.position, what)

    def _doubled(self) -> Iterator[Defect]:
        """Yield the event ids that several rows have. They are collected on disk, not in memory."""
        with closing(sqlite3.connect("")) as seen:
            seen.execute("CREATE TABLE seen (id PRIMARY KEY, position) WITHOUT ROWID")
            for row in self._stored():
                place = row.event_id, row.position
                if seen.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", place).rowcount:
                    continue
                ((first,),) = seen.execute("SELECT position FROM seen WHERE id = ?", place[:1])
                if first != row.position:  # a segment that is given twice is one defect, not one for each row
                    yield doubled(row.event_id, first, row.position)


def _differences(base: Base, there: Base) -> Iterator[Defect]:
    """Yield how the base of a live log differs from the place that the segments have there."""
    for name in ("hash", "recorded_at"):
        if (one := getattr(base, name)) != (two := getattr(there, name)):
            what = f"position {base.position}: the live log's base has the {name} {one}, the segments {two}"
            yield Defect(base.position, what)
    for stream in sorted(base.versions.keys() | there.versions.keys()):
        if (one := base.versions.get(stream, 0)) != (two := there.versions.get(stream, 0)):
            what = f"the live log's base has version {one} of stream {stream}, the segments {two}"
            yield Defect(base.position, f"position {base.position}: {what}")


def _manifest(path: Path) -> Manifest | None:
    try:
        return manifest_of(path)
    except (NotFound, Corrupt):
        return None


def _file_defects(path: Path) -> Iterator[Defect]:
    """Yield what is wrong with a segment's file beside its manifest."""
    try:
        manifest = manifest_of(path)
    except (NotFound, Corrupt) as err:
        yield Defect(0, err.detail)
        return
    if file_sha256(path) != manifest.sha256:
        what = f"positions {manifest.first_position} to {manifest.last_position}: {path.name} was changed"
        yield Defect(manifest.first_position, f"{what}, or its manifest: its SHA-256 is not {manifest.sha256}")
