"""Restoration: a log of the segments in a folder, which ``backup`` or ``archive`` has written, in an empty database.

The new log begins at position 1, whether or not the old one was cut over. All is checked before the database is
touched; one transaction has all rows, and they are read back before its commit. So the database has the whole log
afterwards, or an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from shared.archive.writing import Watch, last_segment, unwatched
from shared.errors import Conflict, Corrupt, InvalidInput, NotFound
from shared.log.archived import manifests_up_to, verified_base
from shared.log.base import START, Base
from shared.log.chain import ChainCheck
from shared.log.driver_errors import database_errors
from shared.log.reading import BATCH
from shared.log.schema import COLUMNS, Database, StoredRow, begin_write, stored_row
from shared.log.segments import read_rows

_NAMES = ", ".join(COLUMNS)
_ROWS = f"SELECT {_NAMES} FROM log ORDER BY position"  # nosec B608 # made of constants
_INSERT = f"INSERT INTO log ({_NAMES}) VALUES ({', '.join('?' * len(COLUMNS))})"  # nosec B608
_COPY = f"COPY log ({_NAMES}) FROM STDIN"


def restore(folder: Path, url: str, at: int | None = None, watch: Watch = unwatched) -> Base:
    """Make a log of segments, and return its last place.

    Args:
        folder: the folder of the segments, which begin at position 1.
        url: the URL of a database without a log, or with a log without an event.
        at: position of the last event that is restored; None: all are restored.
        watch: wraps the rows as they are written.

    Raises:
        NotFound: there is no such folder, or no segment in it.
        InvalidInput: there is no such position in it.
        Corrupt: a segment was changed, or a row is wrong; the database was not touched.
        Archived: a segment is missing.
        Conflict: the log has events: nothing was changed.
    """
    place = verified_base(folder, _end(folder, at))
    with closing(Database(url, read_only=False)) as database, database_errors(f"log {database.name}"):
        with database.writer.begin() as connection:
            begin_write(connection)
            _check_empty(connection, database)
            _insert(connection, watch(_rows(folder, place.position)))
            _check_written(connection, place)
    return place


def _end(folder: Path, at: int | None) -> int:
    """Return the position of the last event that is to be restored."""
    try:
        last = last_segment(folder)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise NotFound(f"no folder of segments at {folder}") from err
    if last is None:
        raise NotFound(f"{folder} has no segment")
    if at is None:
        return last.last_position
    if not 1 <= at <= last.last_position:
        raise InvalidInput(f"position {at}: the folder has the positions 1 to {last.last_position}")
    return at


def _rows(folder: Path, last: int) -> Iterator[StoredRow]:
    """Yield the rows of the segments up to a position."""
    behind = 0
    for manifest in manifests_up_to(folder, last):
        for row in takewhile(lambda row: row.position <= last, read_rows(folder / manifest.file)):
            if row.position > behind:  # segments may overlap where a folder was put together by hand
                behind = row.position
                yield row


def _check_empty(connection: Connection, database: Database) -> None:
    present = connection.exec_driver_sql("SELECT count(*) FROM log").scalar_one()
    if present or database.base.is_cut:
        what = f"{present} events" if present else f"begins behind position {database.base.position}"
        raise Conflict(
            f"{database.name} has a log already ({what}): a backup is restored to an empty database, and nothing is "
            "overwritten"
        )


def _insert(connection: Connection, rows: Iterable[StoredRow]) -> None:
    with closing(connection.connection.cursor()) as opened:
        cursor: Any = opened
        if connection.dialect.name == "sqlite":
            cursor.executemany(_INSERT, rows)
            return
        with cursor.copy(_COPY) as copy:
            for row in rows:
                copy.write_row(row)


def _check_written(connection: Connection, place: Base) -> None:
    """Read the rows back.

    Raises:
        Corrupt: they are not those of the segments.
    """
    check = ChainCheck(START)
    with connection.execution_options(yield_per=BATCH).exec_driver_sql(_ROWS) as rows:
        for row in map(stored_row, rows):
            if problem := check.next(row):
                raise Corrupt(f"{problem}; nothing was restored")
    if check.place != place._replace(segments=""):
        raise Corrupt(f"the new log does not end at {place.position}:{place.hash}; nothing was restored")
