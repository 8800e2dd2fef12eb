"""The log's table, and the opening of a log database: SQLite or PostgreSQL.

``log`` reads and writes the rows. ``guards`` has the triggers that refuse UPDATE, DELETE, TRUNCATE and gaps; ``base``
where a table begins that was cut over.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool
from sqlmodel import Field, SQLModel

from shared.errors import Corrupt, InvalidInput, NotFound, Unavailable
from shared.log.base import START, Base, create_base, read_base
from shared.log.driver_errors import database_errors
from shared.log.guards import add_guards

APPLICATION_ID = 0x554E4943
"""``UNIC`` in ASCII, in the header of an SQLite file (PRAGMA application_id): marks the file as an event log."""

ADVISORY_LOCK = 0x554E49434C4F47
"""``UNICLOG`` in ASCII: the PostgreSQL advisory lock that serialises appends of one database."""

BUSY_TIMEOUT_S = 30.0
"""How long SQLite waits for another writer. An append has the lock for a few milliseconds; on a disk that stalls it may
be seconds, and an error would lose a decision."""

ABANDONED_S = 30.0
"""How long PostgreSQL keeps an append open whose writer says nothing. The writer's machine may have lost its power
while it had the lock, and without this limit no other service could append until the kernel gives up the connection,
after hours. A living writer needs milliseconds between two statements."""

_POSTGRESQL_CONNECTION = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
"""Parameters of libpq, unless the URL has them: a server that is gone without a word (no power, a cut link) is noticed
after about 10 s (``tcp_user_timeout`` is in milliseconds), where the kernel's own limits are minutes to hours."""


def close_engine(engine: sa.Engine) -> None:
    """Close the connections of an engine: those that lie idle now, those in use when they are returned.

    ``Engine.dispose`` forgets the connections in use: a thread that a cancelled call left behind would leave the
    server a connection until the garbage collector finds it.
    """

    @sa.event.listens_for(engine, "checkin")
    def _close(_connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        entry.close()

    engine.dispose()


class LogRow(SQLModel, table=True):
    """One event. Times are ISO 8601 UTC text with microseconds, so that every database hashes the same bytes."""

    __tablename__ = "log"
    __table_args__ = (sa.UniqueConstraint("stream", "stream_version", name="log_stream_version"),)
    # Separate metadata: another module's create_all must not create the log's table without its triggers.
    metadata = sa.MetaData()

    position: int = Field(
        primary_key=True,
        sa_type=sa.BigInteger().with_variant(sa.Integer, "sqlite"),
        sa_column_kwargs={"autoincrement": False},
    )
    event_id: str = Field(unique=True)
    stream: str
    stream_version: int
    type: str
    schema_version: int
    occurred_at: str
    recorded_at: str
    data: str
    previous_hash: str
    hash: str


TABLE = LogRow.__table__  # type: ignore[attr-defined]


Cell: TypeAlias = Any
"""A value of a row as it is stored: a text or an integer, as ``LogRow`` says; in a damaged table, anything."""


class StoredRow(NamedTuple):
    """A row of the table as it is stored: the columns of ``LogRow``, in their order."""

    position: Cell
    event_id: Cell
    stream: Cell
    stream_version: Cell
    type: Cell
    schema_version: Cell
    occurred_at: Cell
    recorded_at: Cell
    data: Cell
    previous_hash: Cell
    hash: Cell


COLUMNS = list(StoredRow._fields)

stored_row: Callable[[Iterable[Any]], StoredRow] = functools.partial(tuple.__new__, StoredRow)
"""Makes a row of values in the order of ``COLUMNS``. It is called for each row of a log, so it is no Python
function."""


def begin_write(connection: sa.Connection) -> None:
    """Take the writer's lock for the rest of the transaction. SQLite takes it with BEGIN IMMEDIATE."""
    if connection.dialect.name == "postgresql":
        limit = f"set_config('idle_in_transaction_session_timeout', '{round(ABANDONED_S * 1000)}', true)"
        connection.exec_driver_sql(f"SELECT {limit}, pg_advisory_xact_lock({ADVISORY_LOCK})")


class Database:
    """An open log database. ``engine`` is for reading; ``writer`` is the same engine with write transactions.

    Args:
        url: SQLAlchemy URL, ``sqlite:///PATH`` or ``postgresql+psycopg://...``.
        read_only: create and change nothing.
        begins: the base of a log that is created.

    ``base``: where the table begins.

    Raises:
        InvalidInput: not a URL of SQLite or PostgreSQL.
        NotFound: read-only, and there is no such file.
        Corrupt: the database is not a log.
        AccessDenied: the database refuses.
        Unavailable: the database does not answer.
    """

    def __init__(self, url: str, *, read_only: bool, begins: Base = START) -> None:
        self.base = begins
        self._copies: tempfile.TemporaryDirectory[str] | None = None
        path = sqlite_path(url)
        self.sqlite = path is not None
        if path is not None:
            self.name = str(path)
            self.engine = self._open_sqlite(path, read_only)
        else:
            parsed = postgresql_url(url)
            self.name = parsed.database or ""
            self.engine = sa.create_engine(parsed, pool_size=4, pool_pre_ping=True)
        self.writer = self.engine.execution_options(unicron_write=True)
        try:
            with database_errors(f"log {self.name}"):
                before = _identity(path)
                self._check_or_create(read_only)
                if not read_only and before not in (None, _identity(path)):
                    raise Unavailable(f"log {self.name} was cut over while it was opened; open it again")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every connection; one that a thread still uses is closed when the thread returns it."""
        close_engine(self.engine)
        if self._copies is not None:
            self._copies.cleanup()
            self._copies = None

    def move(self, statement: str, values: tuple[object, ...]) -> bool:
        """Execute a change of one row that no disk has to keep, in a transaction; return whether there is such a row.

        Args:
            statement: ``{0}`` stands for the driver's mark of a parameter.
            values: of the parameters.
        """
        if not self.sqlite:
            with self.engine.begin() as opened:
                opened.exec_driver_sql("SET LOCAL synchronous_commit TO off")
                return opened.exec_driver_sql(statement.format("%s"), values).rowcount == 1
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute("PRAGMA synchronous=NORMAL")
            try:
                cursor.execute(statement.format("?"), values)
                return bool(cursor.rowcount == 1)
            finally:
                cursor.execute(_DURABLE)
        finally:
            connection.close()

    def _open_sqlite(self, path: Path, read_only: bool) -> sa.Engine:
        if read_only:
            if not path.is_file():
                raise NotFound(f"no log at {path}")
            connect = self._read_only_sqlite(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            connect = _sqlite_connect(path, "mode=rwc")
        engine = sa.create_engine("sqlite+pysqlite://", creator=connect, poolclass=QueuePool, pool_size=4)

        @sa.event.listens_for(engine, "begin")
        def _begin(connection: sa.Connection) -> None:
            # The driver is in autocommit mode (isolation_level None): this is the only place that begins transactions.
            write = connection.get_execution_options().get("unicron_write")
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

        return engine

    def _read_only_sqlite(self, path: Path) -> Callable[[], sqlite3.Connection]:
        """Return a function that opens ``path`` for reading and changes no file beside it.

        A file without ``-wal`` is complete: ``immutable`` neither locks nor creates files. A file with ``-wal`` and
        ``-shm`` is in use, or its writer was killed: a plain read-only connection reads all of it. With ``-wal`` alone,
        or where that connection fails (a read-only folder), both files are copied to a temporary folder and read there.
        """
        wal, shm = Path(f"{path}-wal"), Path(f"{path}-shm")
        if not wal.exists():
            return _sqlite_connect(path, "mode=ro&immutable=1")
        if shm.exists():
            connect = _sqlite_connect(path, "mode=ro")
            with contextlib.suppress(sqlite3.Error), contextlib.closing(connect()) as connection:
                connection.execute("SELECT count(*) FROM sqlite_master")
                return connect
        self._copies = tempfile.TemporaryDirectory(prefix="unicron-log-")
        copy = Path(self._copies.name) / "log.db"
        shutil.copyfile(path, copy)
        shutil.copyfile(wal, f"{copy}-wal")
        return _sqlite_connect(copy, "mode=rw")

    def _check_or_create(self, read_only: bool) -> None:
        with self.engine.connect() as connection:
            found = self._check(connection)
        if found:
            if self.sqlite and not read_only:
                _set_wal(self.engine)  # a cut-over that was killed leaves another mode; else without effect
            return
        if read_only:
            raise Corrupt(f"{self.name} has no event log")
        if self.sqlite:
            _set_wal(self.engine)
        with self.writer.begin() as connection:
            begin_write(connection)
            if not self._check(connection):  # another process may have created the table meanwhile
                create_log(connection, self.base)

    def _check(self, connection: sa.Connection) -> bool:
        """Return whether the database has the log's table.

        Raises:
            Corrupt: the database has another program's tables.
        """
        inspector = sa.inspect(connection)
        if inspector.has_table("log"):
            names = [column["name"] for column in inspector.get_columns("log")]
            if names != COLUMNS:
                raise Corrupt(f"{self.name} is not an event log: its table `log` has the columns {', '.join(names)}")
            if not self.sqlite:  # a cut-over has this lock until its commit: the base is that of the table
                connection.exec_driver_sql("LOCK TABLE log IN ACCESS SHARE MODE")
            self.base = read_base(connection)
            return True
        if self.sqlite and (names := inspector.get_table_names()):
            raise Corrupt(f"{self.name} is not an event log: it has the tables {', '.join(names)}")
        return False


def _identity(path: Path | None) -> tuple[int, int] | None:
    """Return which file is at a path, as device and inode; None if there is none."""
    if path is None or not path.exists():
        return None
    found = path.stat()
    return found.st_dev, found.st_ino


def sqlite_path(url: str) -> Path | None:
    """Return the file of an SQLite URL, else None. All after the slashes is the path, with ``?``, ``#`` and ``%``."""
    scheme, separator, path = url.partition(":///")
    if scheme not in ("sqlite", "sqlite+pysqlite") or not separator or path in ("", ":memory:"):
        return None
    return Path(path)


def postgresql_url(url: str) -> URL:
    """Return a URL of PostgreSQL with its driver and limits.

    Raises:
        InvalidInput: it is no URL of a log, or the driver is not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as err:  # ValueError: a port that is no number
        raise InvalidInput("the URL of the log is no database URL") from err  # it may contain a password
    if parsed.drivername not in ("postgresql", "postgresql+psycopg"):
        raise InvalidInput(f"a log is sqlite:///PATH or postgresql+psycopg://..., not {parsed.drivername}://...")
    if importlib.util.find_spec("psycopg") is None:
        raise InvalidInput("a log on PostgreSQL needs the driver psycopg: install unicron-cluster[postgres]")
    return with_timeouts(parsed.set(drivername="postgresql+psycopg"))


def with_timeouts(url: URL) -> URL:
    """Return a URL of PostgreSQL with the limits after which a server counts as gone, except those that it has."""
    return url.update_query_dict(
        {name: value for name, value in _POSTGRESQL_CONNECTION.items() if name not in url.query}
    )


_DURABLE = "PRAGMA synchronous=FULL"
"""A committed event survives a power failure. In WAL mode this costs one fsync for each commit."""


def _sqlite_connect(path: Path, mode: str) -> Callable[[], sqlite3.Connection]:
    uri = f"file:{quote(str(path.resolve()))}?{mode}"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        # A damaged text reaches the check of its row, which reports the position; the driver would fail for the batch.
        connection.text_factory = text_of
        connection.execute(_DURABLE)
        return connection

    return connect


text_of = functools.partial(str, encoding="utf-8", errors="surrogateescape")
"""Makes text of the bytes in a cell. It is called for nine cells of each row, so it is no Python function."""


def checkpoint(engine: sa.Engine) -> None:
    """Copy the contents of SQLite's write-ahead log into the main file; no writer waits for this."""
    connection = engine.raw_connection()
    try:
        connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)").close()
    finally:
        connection.close()


def _set_wal(engine: sa.Engine) -> None:
    """Switch the file to WAL mode. SQLite does not wait for locks here; a process that meets another one retries.

    Raises:
        Unavailable: the file stays locked for ``BUSY_TIMEOUT_S``.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    connection = engine.raw_connection()
    try:
        while True:
            try:
                connection.cursor().execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as err:
                if "locked" not in str(err) or time.monotonic() > deadline:
                    raise Unavailable(f"log database: {err}") from err
                time.sleep(0.01)
    finally:
        connection.close()


def create_log(connection: sa.Connection, base: Base) -> None:
    """Create the table of a log that begins behind a base, with all that guards it."""
    TABLE.create(connection)
    if base.is_cut:
        create_base(connection, base)
    add_guards(connection, base)
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
