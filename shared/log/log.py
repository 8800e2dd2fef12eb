"""The event log: one append-only SQL table with gapless positions and a hash chain.

    log.append([event])       one short transaction, shared with other threads; the same event id twice appends once
    log.read(after=position)  records in order, a page; read_all() yields every record
    log.verify()              recomputes every hash, position and stream version

A reader never sees position n + 1 before n: a lock that lasts until the commit covers the choice of positions.
``schema`` defines the table and opens the database; ``writing`` has the transaction that appends, ``group`` brings
together the appends that share one; ``relay`` and ``journal`` bring the records to the services.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection, func, select

from shared.errors import Conflict, Unavailable, UnicronError
from shared.events import EVENT, Event, Recorded
from shared.log.chain import FIRST_HASH as FIRST_HASH
from shared.log.chain import ChainReport
from shared.log.chain import row_hash as row_hash
from shared.log.driver_errors import database_errors
from shared.log.group import GroupCommit
from shared.log.scan import Row, Scan, record_of
from shared.log.schema import COLUMNS, TABLE, Database, checkpoint, lacking_guards
from shared.log.unreadable import Skipped, unreadable
from shared.log.writing import Append, draft, transaction, write
from shared.model import Clock, utc_now

_SCAN_BATCH = 500
"""Rows fetched at once in a scan: bounds the memory, whatever the size of the log."""

_COLUMNS = TABLE.c


class Head(NamedTuple):
    """The place of an event and its hash, which covers every event up to it. ``recorded_at``: ISO 8601 in UTC."""

    position: int
    hash: str
    recorded_at: str


class EventLog:
    """The log in SQLite (``sqlite:///PATH``) or PostgreSQL (``postgresql+psycopg://...``); safe to use from threads.

    Args:
        url: SQLAlchemy URL.
        read_only: read a live log or a copied file; nothing is created or modified.
        clock: source of ``recorded_at``.

    Raises:
        NotFound: read-only, and there is no such file.
        Corrupt: the database is damaged or is not a log.
        AccessDenied: the database refuses.
        Unavailable: the database does not answer.
    """

    def __init__(self, url: str, *, read_only: bool = False, clock: Clock = utc_now) -> None:
        self.url = url
        self._database = Database(url, read_only=read_only)
        self._what = f"log {self._database.name}"
        self._clock = clock
        self._read_only = read_only
        self._checkpointed = 0
        # Threads of this process wait for one another here, where they are woken at once; SQLite polls its own lock.
        self._group = GroupCommit(self._commit)

    def append(self, events: Sequence[Event], *, expected: Mapping[str, int] | None = None) -> list[Recorded]:
        """Append events in one transaction and return them with their places, in the order given.

        Appends of several threads that wait at the same time share a transaction (``shared.log.group``). Each is all or
        nothing by itself, and fails by itself.

        An event whose id is in the log already is not appended again: its record is returned. ``expected`` is checked
        unless there is nothing new to append. So after ``Unavailable``, when it is not known whether the transaction
        was committed, the same call can be made again: it takes the writer's lock, for which an earlier transaction
        that still commits is waited for, and reads the log for the ids first.

        Args:
            events: any number of events; none is allowed.
            expected: stream -> version the stream must have now.

        Raises:
            VersionConflict: a stream has another version; nothing was appended.
            Conflict: an event id is in the log with different content (both upcast); nothing was appended.
            InvalidInput: an event cannot be stored (a naive time, text that is not Unicode).
            Unavailable: the database does not answer; whether the events were appended is not known.
        """
        if self._read_only:
            raise Conflict(f"{self._what} was opened read-only")
        append = Append([draft(event) for event in events], expected or {})
        if not append.drafts:
            return []
        self._group.run(append)
        if append.error is not None:
            raise append.error
        return [recorded(row) for row in append.rows]

    def read(self, *, after: int = 0, limit: int = 1000, types: Sequence[str] = ()) -> list[Recorded]:
        """Return the records after position ``after``, in order, at most ``limit``.

        Args:
            after: position.
            limit: most records.
            types: of events that are read; empty: all.

        Raises:
            Corrupt: a record cannot be read back.
            NewerVersion: a newer version of the program wrote a record.
        """
        return [recorded(row) for row in self.page(after=after, limit=limit, types=types)]

    def page(self, *, after: int = 0, limit: int = 1000, types: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return the rows after position ``after`` as they are stored; the arguments are those of ``read``."""
        query = select(TABLE).where(_COLUMNS.position > after).order_by(_COLUMNS.position).limit(limit)
        if types:
            query = query.where(_COLUMNS.type.in_(types))
        with database_errors(self._what), self._database.engine.connect() as connection:
            return [dict(zip(COLUMNS, row, strict=True)) for row in connection.execute(query)]

    def read_all(self) -> Iterator[Recorded]:
        """Yield every record in order, a page at a time; records appended meanwhile are among them.

        Raises:
            Corrupt: a record cannot be read back.
            NewerVersion: a newer version of the program wrote a record.
        """
        position = 0
        while page := self.read(after=position):
            yield from page
            position = page[-1].position

    def last_position(self) -> int:
        """Return the position of the last event; 0 when the log is empty."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            return int(connection.scalar(select(func.coalesce(func.max(_COLUMNS.position), 0))) or 0)

    def stream_version(self, stream: str) -> int:
        """Return the number of events in the stream."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            return _stream_version(connection, stream)

    def scan(self, scan: Scan | None = None) -> Iterator[Row]:
        """Yield every row that is there now, in order, checked and read, whatever is wrong with it.

        Args:
            scan: gives access to the state of the chain's check after each row.

        Raises:
            Corrupt: the database is damaged.
            Unavailable: the database does not answer.
        """
        scan = scan or Scan()
        for row in self.rows():
            yield scan.next(row)

    def rows(self) -> Generator[dict[str, Any]]:
        """Yield every row that is there now, in order, as it is stored. Who stops before the end closes the generator.

        Raises:
            Corrupt: the database is damaged.
            Unavailable: the database does not answer.
        """
        with database_errors(self._what), self._database.engine.connect() as connection:
            # No lower bound, so that a row at a position below 1 is found.
            query = select(TABLE).order_by(_COLUMNS.position).execution_options(yield_per=_SCAN_BATCH)
            with connection.execute(query) as result:
                for row in result:
                    yield dict(zip(COLUMNS, row, strict=True))

    def verify(self) -> ChainReport:
        """Check every row: position, stream version, hash chain, times, and that the columns agree with the event."""
        scan, problem = Scan(), ""
        unknown: list[Skipped] = []
        try:
            for row in self.scan(scan):
                problem = problem or row.problem
                if row.skipped is not None:
                    unknown.append(row.skipped)
        except UnicronError as err:
            problem = problem or f"position {scan.check.events + 1}: {err.detail}"
        return ChainReport(scan.check.events, not problem, problem, scan.check.head, unknown)

    def head(self) -> Head | None:
        """Return the place of the last event; None when the log is empty."""
        query = select(_COLUMNS.position, _COLUMNS.hash, _COLUMNS.recorded_at)
        with database_errors(self._what), self._database.engine.connect() as connection:
            row = connection.execute(query.order_by(_COLUMNS.position.desc()).limit(1)).first()
        return None if row is None else Head(row.position, row.hash, row.recorded_at)

    def hash_at(self, position: int) -> str | None:
        """Return the hash of the event at a position; None if the log has none there."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            found = connection.scalar(select(_COLUMNS.hash).where(_COLUMNS.position == position))
        return None if found is None else str(found)

    def day_ends(self, *, after: int, before: date) -> list[Head]:
        """Return the last event of each day (UTC) before ``before`` that has events behind position ``after``."""
        day = func.substr(_COLUMNS.recorded_at, 1, 10)
        within = (_COLUMNS.position > after) & (_COLUMNS.recorded_at < before.isoformat())
        ends = select(func.max(_COLUMNS.position)).where(within).group_by(day)
        query = select(_COLUMNS.position, _COLUMNS.hash, _COLUMNS.recorded_at).where(_COLUMNS.position.in_(ends))
        with database_errors(self._what), self._database.engine.connect() as connection:
            return [Head(*row) for row in connection.execute(query.order_by(_COLUMNS.position))]

    def raw(self, *types: str, after: int = 0) -> Iterator[tuple[int, str, str]]:
        """Yield position, event id and JSON of the events of some types after a position, in order, as stored."""
        query = select(_COLUMNS.position, _COLUMNS.event_id, _COLUMNS.data).where(_COLUMNS.type.in_(types))
        if after:  # else no lower bound, so that a row at a position below 1 is found
            query = query.where(_COLUMNS.position > after)
        with database_errors(self._what), self._database.engine.connect() as connection:
            for row in connection.execute(query.order_by(_COLUMNS.position).execution_options(yield_per=_SCAN_BATCH)):
                yield row.position, row.event_id, row.data

    def ids(self, *types: str, after: int = 0) -> list[tuple[int, str]]:
        """Return position and event id of the events of some types after a position, in order."""
        within = _COLUMNS.type.in_(types) & (_COLUMNS.position > after)
        query = select(_COLUMNS.position, _COLUMNS.event_id).where(within).order_by(_COLUMNS.position)
        with database_errors(self._what), self._database.engine.connect() as connection:
            return [(row.position, row.event_id) for row in connection.execute(query)]

    def doubled_ids(self) -> list[tuple[str, int, int]]:
        """Return the event ids that several rows have, with the first and the last of their positions.

        The unique index is not asked: who changed the file may have changed the index.
        """
        stored = _COLUMNS.event_id + ""
        places = func.min(_COLUMNS.position), func.max(_COLUMNS.position)
        query = select(stored, *places).group_by(stored).having(func.count() > 1).order_by(places[1])
        with database_errors(self._what), self._database.engine.connect() as connection:
            return [(event_id, first, last) for event_id, first, last in connection.execute(query)]

    def lacking_guards(self) -> list[str]:
        """Return which triggers and constraints the table lacks that refuse changes, in words; empty if it has all."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            return lacking_guards(connection)

    def checkpoint(self) -> None:
        """Bring SQLite's main file up to date if events were appended, so that a copy of that file is nearly complete.

        With PostgreSQL this does nothing.
        """
        if self._database.sqlite and not self._read_only and (last := self.last_position()) != self._checkpointed:
            with database_errors(self._what):
                checkpoint(self._database.engine)
            self._checkpointed = last

    def close(self) -> None:
        """Close the database. The last process that closes an SQLite log leaves a single file."""
        self._database.close()

    def _commit(self, appends: Sequence[Append]) -> None:
        """Commit some appends together; note in each its rows or its error."""
        try:
            with database_errors(self._what), transaction(self._database) as opened:
                write(opened, appends, self._clock)
        except Unavailable as err:
            for append in appends:
                append.error = copy.copy(err)  # each is raised in a thread of its own, which adds a traceback to it
                append.error.__cause__ = err.__cause__
        except Exception as err:
            if len(appends) == 1:
                appends[0].error = err
            else:  # the database has refused one of them, and does not say which
                for append in appends:
                    self._commit([append])


def _stream_version(connection: Connection, stream: str) -> int:
    query = select(func.coalesce(func.max(_COLUMNS.stream_version), 0)).where(_COLUMNS.stream == stream)
    return int(connection.scalar(query) or 0)


def recorded(row: Mapping[str, Any]) -> Recorded:
    """Return the record of a row. The event is read from its JSON, so that appending and reading give equal objects.

    Raises:
        Corrupt: the event cannot be read.
        NewerVersion: a newer version of the program wrote it.
    """
    try:
        return record_of(row, EVENT.validate_json(row["data"]))
    except (ValidationError, ValueError, TypeError) as err:
        raise unreadable(row["position"], row["data"], err) from err
