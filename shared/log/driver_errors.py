"""Errors of the database drivers as this project's: a server that is away, one that refuses, data that is damaged."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator

from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from shared.errors import AccessDenied, Corrupt, Unavailable, UnicronError
from shared.log import refusals

_REFUSED_HERE = re.compile(r"no password supplied|Permission denied")
"""Words of libpq itself, without a server: always in English, since no program here sets ``LC_MESSAGES``."""

_SQLITE_REFUSED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)

_UNDEFINED_TABLE = "42P01"

_REFUSALS = ("28", "3D000", "42501")
"""SQLSTATEs of refusals (PostgreSQL, appendix A), or their first characters: class 28, invalid authorization (no such
role, a wrong password, no entry in pg_hba.conf); no such database; insufficient privilege."""

_AWAY = ("25006", "25P03")
"""SQLSTATEs (PostgreSQL, appendix A) of outages that the driver does not count as operational: a standby that is not
promoted yet is read-only, and a server has ended a transaction in which its client said nothing for too long."""


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
    except sqlite3.Error as err:  # an error of a statement that went past SQLAlchemy
        with database_errors(what):
            raise DBAPIError.instance("", None, err, sqlite3.Error) from err
    except DBAPIError as err:
        if (error := _error(what, err)) is None:
            raise
        raise error from err


def _error(what: str, err: DBAPIError) -> UnicronError | None:
    """Return the project's error for a driver's; None for one that the database itself does not explain."""
    text = f"{what}: {' '.join(str(err.orig).split())}"
    sqlstate = getattr(err.orig, "sqlstate", None)
    if sqlstate is None and err.statement is None and err.orig is not None:
        sqlstate = refusals.sqlstate(err.orig)
    # The low byte of an extended code is the primary one.
    sqlite_code = getattr(err.orig, "sqlite_errorcode", 0) & 0xFF
    if "not a database" in text or "malformed" in text or sqlstate == _UNDEFINED_TABLE:
        return Corrupt(text)
    if (sqlstate or "").startswith(_REFUSALS) or sqlite_code in _SQLITE_REFUSED or _REFUSED_HERE.search(text):
        return AccessDenied(text)
    if isinstance(err, OperationalError) or err.connection_invalidated or sqlstate in _AWAY:
        return Unavailable(text)
    return None
