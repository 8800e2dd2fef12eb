"""Errors of the database drivers as this project's: a server that is away, one that refuses, data that is damaged."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator

from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from shared.errors import AccessDenied, Corrupt, Unavailable, UnicronError

_REFUSED = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|permission denied"
    r"|FATAL: +(database|role) .* does not exist"
)
"""PostgreSQL's refusals of a connection. libpq passes on no SQLSTATE for them. A server that words them otherwise (with
``lc_messages`` of another language) is waited for as long as the start may take."""

_SQLITE_REFUSED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)

_UNDEFINED_TABLE, _INSUFFICIENT_PRIVILEGE, _READ_ONLY = "42P01", "42501", "25006"
"""SQLSTATEs (PostgreSQL, appendix A) of errors that are none of operation to the driver. A standby that is not promoted
yet is read-only."""


@contextlib.contextmanager
def database_errors(what: str) -> Iterator[None]:
    """Turn the driver's errors into this project's.

    Args:
        what: the database in words, for the message.

    Raises:
        Corrupt: the file is not a database, or is damaged; the server's database has no such table.
        AccessDenied: the database refuses.
        Unavailable: the database cannot be reached, or is locked for too long.
    """
    try:
        yield
    except PoolTimeout as err:
        raise Unavailable(f"{what}: no connection is free") from err
    except DBAPIError as err:
        if (error := _error(what, err)) is None:
            raise
        raise error from err


def _error(what: str, err: DBAPIError) -> UnicronError | None:
    """Return the project's error for a driver's; None for one that the database itself does not explain."""
    text = f"{what}: {' '.join(str(err.orig).split())}"
    sqlstate = getattr(err.orig, "sqlstate", None)
    # The low byte of an extended code is the primary one.
    sqlite_code = getattr(err.orig, "sqlite_errorcode", 0) & 0xFF
    if "not a database" in text or "malformed" in text or sqlstate == _UNDEFINED_TABLE:
        return Corrupt(text)
    if sqlstate == _INSUFFICIENT_PRIVILEGE or sqlite_code in _SQLITE_REFUSED or _REFUSED.search(text):
        return AccessDenied(text)
    if isinstance(err, OperationalError) or err.connection_invalidated or sqlstate == _READ_ONLY:
        return Unavailable(text)
    return None
