"""The cut-over: a log's table begins anew behind events that are archived, and the old one is set aside as it is.

    base = verified_base(folder, position)      (``archived``: read back and checked from position 1 on)
    cut(url, base)

Nothing is deleted. A new table with the same columns, triggers and constraints gets the base and the rows behind it, is
read back, and takes the place of the old one in one step: on SQLite the rename of a file, on PostgreSQL a transaction.
A program that is killed before that step leaves the old log, and one that is killed after it the new log; the same call
made again finishes.

No other program may have the log open: SQLite's exclusive lock on the file, PostgreSQL's list of connections say so.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, inspect
from sqlalchemy.exc import OperationalError

from shared.errors import Conflict, Corrupt
from shared.log.base import TABLES, Base, read_base
from shared.log.chain import ChainCheck
from shared.log.driver_errors import database_errors
from shared.log.reading import BATCH
from shared.log.schema import COLUMNS, Database, StoredRow, create_log, postgresql_url, sqlite_path, stored_row, text_of
from shared.machine.durable_files import sync_folder

SOLE_S = 2.0
"""How long to wait for another program that has the log open: a program that only looks at the log is done sooner, a
service has it open all the time."""

_POLL_S = 0.05
"""Pause between two looks at the list of connections."""

_LOCK_TIMED_OUT = "55P03"
"""PostgreSQL's code for a lock that was not free within ``lock_timeout``."""

_DIGITS = 12
"""Digits of a position in a file's name, as of segments."""

_SET_ASIDE = re.compile(rf"log-\d{{{_DIGITS},}}-\d{{{_DIGITS},}}\.db")
"""Names of files that were set aside."""

_LAST = "SELECT max(position) FROM log"
_ROWS = f"SELECT {', '.join(COLUMNS)} FROM log"  # nosec B608 # made of constants


def cut(url: str, base: Base) -> str:
    """Let the log begin behind a base; return the file or table that was set aside, empty if it begins there already.

    Args:
        url: the log's URL.
        base: the place behind which the log is to begin; all up to there is archived.

    Raises:
        Conflict: another program has the log open, or what is set aside would replace something.
        Corrupt: the log does not have the base, or a row behind it is wrong; nothing was changed.
        NotFound, AccessDenied, Unavailable: the database has no log, refuses, or does not answer.
    """
    with closing(Database(url, read_only=True)) as database:
        if database.base.position == base.position and database.base.hash == base.hash:
            return ""
        if base.position <= database.base.position:
            raise Conflict(f"the log begins behind position {database.base.position} already")
    path = sqlite_path(url)
    # Links are followed: the file itself is set aside, and the new file lies where the old one lay.
    return _cut_file(path.resolve(), base) if path is not None else _cut_table(url, base)


# ---- SQLite


def _cut_file(path: Path, base: Base) -> str:
    with database_errors(f"log {path}"), _sole(path) as old:
        ((first, last),) = old.execute("SELECT min(position), max(position) FROM log")
        fresh = path.with_name(f".{path.name}.cut")
        _check_has(old.execute("SELECT hash FROM log WHERE position = ?", (base.position,)).fetchone(), base)
        rows = map(stored_row, old.execute(f"{_ROWS} WHERE position > ? ORDER BY position", (base.position,)))  # nosec B608
        kept = path.with_name(f"log-{first:0{_DIGITS}d}-{last:0{_DIGITS}d}.db")
        try:
            build(fresh, base, rows)
            set_aside(path, kept)
            replace(path, fresh)
        finally:
            fresh.unlink(missing_ok=True)
        return str(kept)


@contextmanager
def _sole(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a log's file so that no other program has it open, nor can until the block ends.

    Raises:
        Conflict: another program has it open.
    """
    uri = f"file:{quote(str(path.resolve()))}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=SOLE_S, isolation_level=None)) as connection:
        connection.text_factory = text_of
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        try:
            # In WAL mode each connection has a lock of the file for as long as it is open, and this waits for all. The
            # file is complete then, without another one beside it, and can be renamed.
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as err:
            if "locked" not in str(err):
                raise
            raise Conflict(f"another program has {path} open: stop all services, and cut the log then") from err
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            with suppress(sqlite3.OperationalError):  # who opens the log to write it does the same
                connection.execute("PRAGMA journal_mode=WAL")
            raise
        connection.execute("ROLLBACK")


def build(fresh: Path, base: Base, rows: Iterable[StoredRow]) -> None:
    """Make a file with the log behind a base, and read it back; it is on the disk when this returns.

    Raises:
        Corrupt: a row is wrong, or what was written reads otherwise.
    """
    for ending in ("", "-wal", "-shm", "-journal"):
        Path(f"{fresh}{ending}").unlink(missing_ok=True)
    with closing(Database(f"sqlite:///{fresh}", read_only=False, begins=base)) as database:
        with closing(database.engine.raw_connection()) as raw:
            cursor = raw.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            written = ChainCheck(base)
            marks = ", ".join("?" * len(COLUMNS))
            driver: Any = cursor  # sqlite3 takes an iterator
            driver.executemany(f"INSERT INTO log VALUES ({marks})", _checked(rows, written))  # nosec B608
            cursor.execute("COMMIT")
            there = ChainCheck(base)
            for _ in _checked(map(stored_row, cursor.execute(f"{_ROWS} ORDER BY position")), there):  # nosec B608
                pass
    if there.place != written.place:
        raise Corrupt(f"{fresh} does not read as it was written; nothing was changed")


def set_aside(path: Path, kept: Path) -> None:
    """Give the old log's file a second name, under which it stays.

    Raises:
        Conflict: another file has that name.
    """
    for other in path.parent.iterdir():
        if other.name != path.name and _SET_ASIDE.fullmatch(other.name) and other.samefile(path):
            other.unlink()  # left by a cut-over that was killed here; the log may have more rows now
    try:
        kept.hardlink_to(path)
    except FileExistsError as err:
        raise Conflict(f"{kept} is there already, and is not this log") from err
    sync_folder(path.parent)


def replace(path: Path, fresh: Path) -> None:
    """Let the new file take the place of the old one, with its owner and mode: services may be another user."""
    old = path.stat()
    fresh.chmod(old.st_mode & 0o777)
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(fresh, old.st_uid, old.st_gid)
    fresh.replace(path)
    sync_folder(path.parent)


# ---- PostgreSQL


def _cut_table(url: str, base: Base) -> str:
    engine = create_engine(postgresql_url(url))
    try:
        with database_errors("log"), engine.begin() as connection:
            _lock_table(connection)
            present = read_base(connection)
            last = connection.exec_driver_sql(_LAST).scalar()
            found = connection.exec_driver_sql("SELECT hash FROM log WHERE position = %s", (base.position,)).first()
            _check_has(found, base)
            name = f"log_until_{base.position}"
            _rename(connection, name, present)
            create_log(connection, base)
            connection.exec_driver_sql(
                f"INSERT INTO log SELECT * FROM {name} WHERE position > %s ORDER BY position",  # nosec B608
                (base.position,),
            )
            check = ChainCheck(base)
            batches = connection.execution_options(yield_per=BATCH)
            with batches.exec_driver_sql(f"{_ROWS} ORDER BY position") as rows:  # nosec B608
                for _ in _checked(map(stored_row, rows), check):
                    pass
            if check.place.position != last:
                raise Corrupt(f"the new table ends at position {check.place.position}, the old one at {last}")
            return name
    finally:
        engine.dispose()


def _lock_table(connection: Connection) -> None:
    """Take the lock for which every program that opens the log waits; refuse while the log is open elsewhere.

    Raises:
        Conflict: another connection of the log's role has the database open.
    """
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {round(SOLE_S * 1000)}")
    try:
        connection.exec_driver_sql("LOCK TABLE log IN ACCESS EXCLUSIVE MODE")
    except OperationalError as err:
        if getattr(err.orig, "sqlstate", None) != _LOCK_TIMED_OUT:
            raise
        raise Conflict("another program uses the log: stop all services, and cut the log then") from err
    deadline_s = time.monotonic() + SOLE_S
    while others := _others(connection):  # a connection that was closed is there for a moment
        if time.monotonic() > deadline_s:
            what = f"{others} other connections of this role have the database open"
            raise Conflict(f"{what}: stop all services, and cut the log then")
        time.sleep(_POLL_S)


def _others(connection: Connection) -> int:
    """Return how many other connections of this role the database has."""
    connection.exec_driver_sql("SELECT pg_stat_clear_snapshot()")  # else a transaction sees the first answer again
    return int(
        connection.exec_driver_sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = current_user "
            "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).scalar_one()
    )


def _rename(connection: Connection, name: str, present: Base) -> None:
    """Rename the tables of the log, and their constraints, whose names the new ones need."""
    if inspect(connection).has_table(name):
        raise Conflict(f"the database has a table {name} already")
    tables = {"log": name}
    if present.is_cut:
        tables |= {table.name: f"{name}{table.name.removeprefix('log')}" for table in TABLES}
    for old, new in tables.items():
        names = connection.exec_driver_sql(
            "SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(%s) AND contype IN ('p', 'u')", (old,)
        )
        for (constraint,) in names.all():
            renamed = f"{new}{constraint.removeprefix(old)}"
            connection.exec_driver_sql(f"ALTER TABLE {old} RENAME CONSTRAINT {constraint} TO {renamed}")
        connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}")


# ---- both


def _check_has(found: object, base: Base) -> None:
    """Raise ``Corrupt`` unless a log has the event of a base; ``found``: its hash there, as a row, or None."""
    if found is None or tuple(found) != (base.hash,):  # type: ignore[arg-type]
        raise Corrupt(f"position {base.position} of the log is not the event that was archived")


def _checked(rows: Iterable[StoredRow], check: ChainCheck) -> Iterator[StoredRow]:
    """Yield rows as they pass the check of the chain.

    Raises:
        Corrupt: one does not.
    """
    for row in rows:
        if problem := check.next(row):
            raise Corrupt(f"{problem}; nothing was changed")
        yield row
