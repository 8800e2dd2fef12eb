"""The end of an engine of SQLAlchemy while threads still use it."""

from __future__ import annotations

from sqlalchemy import Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry


def close_engine(engine: Engine) -> None:
    """Close the connections of an engine: those that lie idle now, those in use when they are returned.

    ``Engine.dispose`` forgets the connections in use: a thread that a cancelled call left behind would leave the
    server a connection until the garbage collector finds it.
    """

    @event.listens_for(engine, "checkin")
    def _close(_connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        entry.close()

    engine.dispose()
