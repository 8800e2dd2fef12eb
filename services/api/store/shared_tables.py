"""Tables that all apis share and that do not follow from the log: beside an SQLite log, or in the log's PostgreSQL.

Whichever api needs them first makes them. They have metadata of their own: what drops the projections must not drop
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, MetaData, create_engine, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

from shared.log.driver_errors import database_errors
from shared.log.schema import close_engine, sqlite_path, with_timeouts

T = TypeVar("T")


class SharedTables:
    """Tables, in SQLite or PostgreSQL; its methods block.

    Args:
        url: SQLAlchemy URL.
        metadata: of the tables.
        what: what they keep, for errors.
        private: whether other users of the machine may not read a file of SQLite.
    """

    def __init__(self, url: str, metadata: MetaData, what: str, *, private: bool = False) -> None:
        path = sqlite_path(url)
        self._private_file = path if private else None
        place = URL.create("sqlite", database=str(path)) if path is not None else with_timeouts(make_url(url))
        self._engine = create_engine(place, pool_pre_ping=path is None)
        self._metadata, self._what, self._made = metadata, what, False

    def run(self, do: Callable[[Connection], T]) -> T:
        """Return what a function returns that reads or writes the tables, in a transaction of its own.

        Raises:
            Unavailable: the database does not answer.
        """
        with database_errors(self._what):
            if not self._made:
                self._make()
                self._made = True
            with self._engine.begin() as connection:
                return do(connection)

    def close(self) -> None:
        """Close the connections."""
        close_engine(self._engine)

    def _make(self) -> None:
        if self._private_file is not None:
            self._private_file.touch(mode=0o600)
        try:
            self._metadata.create_all(self._engine)
        except DBAPIError:
            # Another api, or another thread, may have made them in between; databases say so in many ways.
            present = inspect(self._engine)
            if not all(present.has_table(name) for name in self._metadata.tables):
                raise
