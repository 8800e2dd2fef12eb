"""The projections in their database: the fold writes them, requests read them.

One transaction writes the views together with the position up to which the log has been folded. One transaction, too,
reads all views of one answer, so that they are of one position even if the fold goes on meanwhile. Tables:
``services/api/store/tables.py``; the fold itself: ``shared/projections``.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, Table, event, inspect, select, text
from sqlalchemy import create_engine as sqlalchemy_engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.schema import DropTable

from services.api.store import settling
from services.api.store.batches import Batch, upsert
from services.api.store.parsed_views import ParsedViews
from services.api.store.readers import Memo, ViewReader
from services.api.store.settling import SettledTime, settled_time
from services.api.store.tables import PREFIX, PositionRow, Tables, table_of
from shared.events.union import Recorded
from shared.log.driver_errors import database_errors
from shared.log.schema import close_engine, sqlite_path, with_timeouts
from shared.projections.evolve import evolve
from shared.settings.model import Settings
from shared.views.documents import SCHEMA_VERSION

_BUSY_TIMEOUT_MS = 10_000
"""How long SQLite waits for another process's lock; the fold's transactions take milliseconds."""

_WHAT = "projections"

_OF_A_VERSION = re.compile(r"api(\d*)_([a-z_]+)")
"""The name of a table of the fold, with its version; tables without one are of before there was one."""

Observe = Callable[[Batch], None]
"""Takes note of what a batch of the fold has changed."""


def ignored(_: Batch) -> None:
    """Take no note of what a batch has changed."""


def database_url(settings: Settings, name: str) -> str:
    """Return where tables of the api are: in a file of a name beside an SQLite log, or in the log's PostgreSQL."""
    url = settings.log_database_url
    return f"sqlite:///{settings.run_dir.resolve() / name}.db" if url.startswith("sqlite") else url


class Store:
    """The projections in SQLite or PostgreSQL; safe to use from threads.

    Args:
        url: SQLAlchemy URL.

    Raises:
        Unavailable: the database does not answer.
    """

    def __init__(self, url: str) -> None:
        self._sqlite = url.startswith("sqlite")
        self._engine: Engine
        if self._sqlite:
            path = sqlite_path(url)
            # Not the text: a part of a path that looks like a query or an escape would be read as one.
            place = URL.create("sqlite", database=str(path)) if path is not None else make_url(url)
            self._engine = sqlalchemy_engine(place, connect_args={"check_same_thread": False})
            event.listen(self._engine, "connect", _set_pragmas)
        else:
            self._engine = sqlalchemy_engine(with_timeouts(make_url(url)), pool_pre_ping=True)
        self._folding = threading.Lock()
        self._parsed = ParsedViews()
        self._batch = Batch(self._parsed)
        self._memo = Memo()
        self._folded = 0
        """Position up to which ``_batch`` knows the views."""
        try:
            with database_errors(_WHAT):
                self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        """Make the tables of this version of the fold, and drop those of versions beside which it does not work."""
        Tables.metadata.create_all(self._engine)
        own = {name.removeprefix(PREFIX) for name in Tables.metadata.tables}
        beside = range(SCHEMA_VERSION - 1, SCHEMA_VERSION + 2)
        with self._engine.begin() as connection:
            for name in inspect(connection).get_table_names():
                found = _OF_A_VERSION.fullmatch(name)
                if found and found[2] in own and int(found[1] or 0) not in beside:
                    connection.execute(DropTable(Table(name, MetaData()), if_exists=True))

    def reset(self) -> None:
        """Drop everything; the next fold starts at position 0."""
        with database_errors(_WHAT), self._folding:
            self._batch.forget()
            Tables.metadata.drop_all(self._engine)
            Tables.metadata.create_all(self._engine)

    def position(self) -> int:
        """Return the position up to which the log has been folded."""
        return self.head()[0]

    def head(self) -> tuple[int, str]:
        """Return the position up to which the log has been folded, and the hash of its record."""
        with database_errors(_WHAT), self._engine.connect() as connection:
            return _head(connection)

    def fold(self, records: Sequence[Recorded], observe: Observe = ignored) -> int:
        """Fold records into the tables and save the position; return the position.

        Records at or below the saved position are skipped, so a repeated delivery has no effect. Each part of them up
        to a position at which time is settled is a transaction (``store/settling.py``).

        Args:
            records: of the log.
            observe: called with what the records have changed, once that is committed.
        """
        with database_errors(_WHAT), self._folding:
            for part in settling.parts(records):
                try:
                    with self._writing() as connection:
                        self._folded = self._fold(connection, part)
                except BaseException:
                    self._batch.forget()
                    raise
                observe(self._batch)
                self._batch.end()
            return self._folded

    def _fold(self, connection: Connection, records: Sequence[Recorded]) -> int:
        position, head = _head(connection)
        settled = settled_time(connection)
        if position != self._folded:
            self._batch.forget()  # the tables were folded by another process, or by an earlier one
        new = [recorded for recorded in records if recorded.position > position]
        self._batch.begin(connection, new)
        for recorded in new:
            evolve(self._batch.views, recorded)
            position, head = recorded.position, recorded.hash
        self._batch.write()
        if new:
            settled = settling.give_up(connection, self._batch, settled)
            settled = settling.settle(connection, self._batch, settled, new[-1])
        _write_place(connection, position, head, settled)
        return position

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Connection]:
        """Give a transaction in which no other process folds: the position that it reads is the one that it replaces.

        Others may fold meanwhile: the process of a gateway that has just been killed, and each of several gateways over
        one database.
        """
        with self._engine.begin() as connection:
            if self._sqlite:
                connection.execute(text("BEGIN IMMEDIATE"))
            else:
                connection.execute(text(f"LOCK TABLE {table_of(PositionRow).name} IN SHARE ROW EXCLUSIVE MODE"))
            yield connection

    @contextlib.contextmanager
    def reading(self) -> Iterator[ViewReader]:
        """Give a reader of the views at the present position; records folded later do not change what it reads.

        Raises:
            Unavailable: the database does not answer.
        """
        with database_errors(_WHAT), self._engine.connect() as connection:
            if self._sqlite:
                connection.execute(text("BEGIN"))  # the driver begins a transaction for writes only
            else:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            yield ViewReader(connection, self._memo, self._parsed)

    def close(self) -> None:
        """Close every connection; one that a thread still uses is closed when the thread returns it."""
        close_engine(self._engine)


def _head(connection: Connection) -> tuple[int, str]:
    table = table_of(PositionRow)
    row = connection.execute(select(table.c.position, table.c.head)).first()
    return (int(row.position), str(row.head)) if row is not None else (0, "")


def _write_place(connection: Connection, position: int, head: str, settled: SettledTime) -> None:
    place = {"id": 1, "position": position, "head": head, **settled.row()}
    upsert(connection, table_of(PositionRow), [place])


def _set_pragmas(connection: Any, _record: Any) -> None:
    """Let readers not wait for the fold (WAL); what a power cut loses (NORMAL) is folded again from the log."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    cursor.close()
