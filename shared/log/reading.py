"""Rows of the table as they are stored: a page of them, or all.

SQLite's driver is asked past SQLAlchemy, as ``writing`` does it: SQLAlchemy and a map for each row take four times as
long as the driver. ``log`` reads by this module; ``scan`` checks the rows that were read.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from sqlalchemy import func, select

from shared.log.schema import COLUMNS, TABLE, Database, StoredRow, stored_row, text_of

BATCH = 500
"""Number of rows that are fetched at once in a scan, which bounds the memory whatever the size of the log."""

_ROWS = f"SELECT {', '.join(COLUMNS)} FROM log"  # nosec B608 # made of constants, as are those below
# No lower bound, so that a row at a position below 1 is found.
_EVERY = f"{_ROWS} ORDER BY position"
_PAGE = f"{_ROWS} WHERE position > ? ORDER BY position LIMIT ?"  # nosec B608
_OF_TYPES = f"{_ROWS} WHERE position > ? AND type IN (SELECT value FROM json_each(?)) ORDER BY position LIMIT ?"  # nosec B608


def every_row(database: Database) -> Generator[StoredRow]:
    """Yield every row that is there now, in order.

    Raises:
        DBAPIError: an error of PostgreSQL's driver, by SQLAlchemy. sqlite3.Error: an error of SQLite.
    """
    if database.sqlite:
        with closing(database.engine.raw_connection()) as raw:
            driver: Any = raw.driver_connection
            driver.execute("BEGIN")  # the same rows for both statements of ``_cells``; the pool rolls back
            yield from map(stored_row, _cells(driver))
        return
    query = select(TABLE).order_by(TABLE.c.position).execution_options(yield_per=BATCH)
    with database.engine.connect() as connection, connection.execute(query) as result:
        yield from map(stored_row, result)


def _cells(driver: sqlite3.Connection) -> Iterator[Any]:
    """Yield the cells of every row. Texts are made by the driver itself, up to the first one that is not Unicode."""
    number = 0
    driver.text_factory = str
    try:
        with closing(driver.execute(_EVERY)) as cursor:
            while batch := cursor.fetchmany(BATCH):
                number += len(batch)
                yield from batch
        return
    except sqlite3.OperationalError as err:
        if "decode" not in str(err):
            raise
    finally:
        driver.text_factory = text_of
    yield from itertools.islice(driver.execute(_EVERY), number, None)


def page(database: Database, after: int, limit: int, types: Sequence[str]) -> list[StoredRow]:
    """Return the rows after a position, in order, at most ``limit``; only those of some types, if any are named.

    Raises:
        DBAPIError, sqlite3.Error: as ``every_row``.
    """
    if database.sqlite:
        with closing(database.engine.raw_connection()) as raw:
            cursor = raw.cursor()
            if types:
                cursor.execute(_OF_TYPES, (after, json.dumps(list(types)), limit))
            else:
                cursor.execute(_PAGE, (after, limit))
            return list(map(stored_row, cursor.fetchall()))
    query = select(TABLE).where(TABLE.c.position > after).order_by(TABLE.c.position).limit(limit)
    if types:
        query = query.where(TABLE.c.type.in_(types))
    with database.engine.connect() as connection:
        return list(map(stored_row, connection.execute(query)))


def sampled(database: Database, stream: str, number: int, after: int, before: int | None) -> list[StoredRow]:
    """Return rows of a stream between two positions, at most ``number``, evenly spread, the first and the last too.

    Raises:
        DBAPIError: as ``every_row``.
    """
    within = [TABLE.c.stream == stream, TABLE.c.position > after]
    if before is not None:
        within.append(TABLE.c.position < before)
    version = TABLE.c.stream_version
    with database.engine.connect() as connection:
        first, last = connection.execute(select(func.min(version), func.max(version)).where(*within)).one()
        if first is None:
            return []
        steps = max(1, number - 1)
        chosen = sorted({first + (last - first) * index // steps for index in range(number)})
        query = select(TABLE).where(TABLE.c.stream == stream, version.in_(chosen)).order_by(version)
        return list(map(stored_row, connection.execute(query)))
