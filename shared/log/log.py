"""The event log: one append-only SQL table with gapless positions and a hash chain.

    log.append([event])       one short transaction; the same event id twice appends once
    log.read(after=position)  records in order, a page; read_all() yields every record
    log.verify()              recomputes every hash, position and stream version

The table of a log that was cut over (``cutover``) begins behind archived segments. Appends go on from there, and
reading takes positions below from the segments (``archived``). The methods that examine the table itself (``rows``,
``scan``, ``verify``) begin where the table does.

A reader never sees position n + 1 before n: a lock that lasts until the commit covers the choice of positions.
``schema`` defines the table and opens the database; ``writing`` has the transaction that appends; ``relay`` and
``journal`` bring the records to the services.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import date, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from sqlalchemy import func, select, update

from shared.errors import Conflict, OlderVersion, Unavailable, UnicronError
from shared.events.union import Event, Recorded, parsed
from shared.log.archived import ArchivedRows
from shared.log.base import FIRST_HASH as FIRST_HASH
from shared.log.base import base_problem
from shared.log.chain import ChainReport
from shared.log.chain import row_hash as row_hash
from shared.log.driver_errors import database_errors
from shared.log.guards import lacking_guards
from shared.log.lease import LEASES, RENEW, Lease, read_leases, take
from shared.log.reading import BATCH, every_row, page, sampled
from shared.log.scan import Row, Scan, record_of, utc_text
from shared.log.schema import TABLE, Database, StoredRow, begin_write, checkpoint, sqlite_path
from shared.log.unreadable import Skipped, of_next_version, unreadable
from shared.log.writing import Append, draft, lease_lost, transaction, write
from shared.model import Clock, utc_now

_COLUMNS = TABLE.c

_DAY_LENGTH = len("2024-01-01")


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
        segments: folder of the segments before the table; None: the one to which they were archived.

    ``base``: the place behind which the table begins.

    Raises:
        NotFound: read-only, and there is no such file.
        Corrupt: the database is damaged or is not a log.
        AccessDenied: the database refuses.
        Unavailable: the database does not answer.
    """

    def __init__(
        self, url: str, *, read_only: bool = False, clock: Clock = utc_now, segments: Path | None = None
    ) -> None:
        self.url = url
        self._database = Database(url, read_only=read_only)
        self.base = self._database.base
        self._archived = ArchivedRows(self.base, segments)
        self._what = f"log {self._database.name}"
        self._clock = clock
        self._read_only = read_only
        self._checkpointed = 0
        # Threads of this process wait for one another here, where they are woken at once; SQLite polls its own lock.
        self._appending = threading.Lock()

    def append(
        self, events: Sequence[Event], *, expected: Mapping[str, int] | None = None, lease: Lease | None = None
    ) -> list[Recorded]:
        """Append events in one transaction and return them with their places, in the order given.

        An event whose id is in the log already is not appended again: its record is returned. ``expected`` is checked
        unless there is nothing new to append. So after ``Unavailable``, when it is not known whether the transaction
        was committed, the same call can be made again: it takes the writer's lock, for which an earlier transaction
        that still commits is waited for, and reads the log for the ids first.

        Args:
            events: any number of events; none is allowed.
            expected: stream -> version the stream must have now.
            lease: what the service that appends must still hold.

        Raises:
            LeaseLost: another instance of the service has taken the lease; nothing was appended.
            VersionConflict: a stream has another version; nothing was appended.
            Conflict: an event id is in the log with different content (both upcast); nothing was appended.
            InvalidInput: an event cannot be stored (a naive time, text that is not Unicode).
            Unavailable: the database does not answer; whether the events were appended is not known.
        """
        return [recorded(row) for row in self.append_rows(events, expected=expected, lease=lease)]

    def append_rows(
        self, events: Sequence[Event], *, expected: Mapping[str, int] | None = None, lease: Lease | None = None
    ) -> list[StoredRow]:
        """Append events as ``append`` does; return their rows, in the order given."""
        if self._read_only:
            raise Conflict(f"{self._what} was opened read-only")
        return self._commit([Append([draft(event) for event in events], expected or {}, lease=lease)])

    def check_writable(self) -> None:
        """Check that events could be appended now: take the writer's lock and give it back, and look for space.

        Waits for another writer for as long as an append does.

        Raises:
            Unavailable: they could not be appended.
            AccessDenied: the database refuses.
        """
        with database_errors(self._what), transaction(self._database):
            pass
        path = sqlite_path(self.url)
        if path is not None and shutil.disk_usage(path.parent).free == 0:
            raise Unavailable(f"{self._what}: its disk is full")

    def leases(self) -> dict[str, Lease]:
        """Return the leases of the services, by service."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            return read_leases(connection)

    def take_lease(self, service: str, holder: str, seen: Lease | None) -> Lease | None:
        """Take the lease of a service, with a higher token; return None if it has moved since it was read.

        Args:
            service: whose lease it is.
            holder: the process that takes it.
            seen: the lease as it was read, which its judge lets be taken; None: there was none.
        """
        least = int(self._clock().timestamp())
        with database_errors(self._what), self._database.writer.begin() as connection:
            begin_write(connection)
            return take(connection, service, holder, seen, least)

    def renew_lease(self, lease: Lease, handled: int = 0) -> None:
        """Move the counter of a lease on. No renewal waits for the disk: after a loss of power nobody holds it.

        Args:
            lease: as it was taken.
            handled: position up to which the holder has handled the log.

        Raises:
            LeaseLost: another instance has taken it.
        """
        values = (handled, handled, lease.service, lease.token)
        with database_errors(self._what):
            if not self._database.move(RENEW, values):
                found = self.leases().get(lease.service)
                raise lease_lost(lease, found.token if found is not None else 0)

    def release_lease(self, lease: Lease) -> None:
        """Give a lease back, so that another instance takes it at once; without effect on one that was lost."""
        given_back = update(LEASES).where(LEASES.c.service == lease.service, LEASES.c.token == lease.token)
        with database_errors(self._what), self._database.writer.begin() as connection:
            begin_write(connection)
            connection.execute(given_back.values(holder="", counter=LEASES.c.counter + 1))

    def append_history(self, history: Sequence[tuple[datetime, Sequence[Event]]]) -> None:
        """Append events of a simulated history, with the times at which they are recorded there, in one transaction.

        Args:
            history: times, which do not fall, and the events that are recorded at each. A time before that of the log's
                last event is replaced by that.

        Raises:
            Conflict, InvalidInput, Unavailable: as ``append``.
        """
        if self._read_only:
            raise Conflict(f"{self._what} was opened read-only")
        self._commit([Append([draft(event) for event in events], {}, recorded_at=at) for at, events in history])

    def read(self, *, after: int = 0, limit: int = 1000, types: Sequence[str] = ()) -> list[Recorded]:
        """Return the records after position ``after``, in order, at most ``limit``.

        Args:
            after: position.
            limit: most records.
            types: the types of events that are read; empty: all.

        Raises:
            Corrupt: a record cannot be read back.
            NewerVersion: a newer version of the program wrote a record.
            Archived: records are in segments that are not there.
        """
        return [recorded(row) for row in self.page(after=after, limit=limit, types=types)]

    def page(self, *, after: int = 0, limit: int = 1000, types: Sequence[str] = ()) -> list[StoredRow]:
        """Return the rows after position ``after`` as they are stored; the arguments are those of ``read``."""
        rows = self._archived.page(after, limit, types)
        if len(rows) < limit:
            with database_errors(self._what):
                rows += page(self._database, max(after, self.base.position), limit - len(rows), types)
        return rows

    def sampled(self, stream: str, number: int, *, after: int, before: int | None = None) -> list[Recorded]:
        """Return records of a stream between two positions, at most ``number``, evenly spread; none of archived ones.

        Raises:
            Corrupt, NewerVersion: as ``read``.
        """
        with database_errors(self._what):
            rows = sampled(self._database, stream, number, max(after, self.base.position), before)
        return list(map(recorded, rows))

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
            return int(connection.scalar(select(func.max(_COLUMNS.position))) or self.base.position)

    def last_before(self, end: int | datetime) -> int:
        """Return the last position before another one, or of what was recorded before a time; else the base."""
        within = _COLUMNS.position < end if isinstance(end, int) else _COLUMNS.recorded_at < utc_text(end)
        with database_errors(self._what), self._database.engine.connect() as connection:
            found = connection.scalar(select(func.max(_COLUMNS.position)).where(within))
        return int(found or self.base.position)

    def last_of_types(self, types: Sequence[str], number: int) -> int:
        """Return the position behind which the last ``number`` events of some types are; 0: there are no more.

        Raises:
            Archived, Corrupt: as ``read``.
        """
        if number <= 0:
            return self.last_position()
        query = select(_COLUMNS.position).where(_COLUMNS.type.in_(types))
        newest = query.order_by(_COLUMNS.position.desc()).limit(number)
        with database_errors(self._what), self._database.engine.connect() as connection:
            found = [row.position for row in connection.execute(newest)]
        if len(found) < number and self.base.position:
            earlier = [row.position for row in self._archived.rows() if row.type in types]
            found += reversed(earlier[len(found) - number :])
        return found[-1] - 1 if len(found) == number else 0

    def stream_version(self, stream: str) -> int:
        """Return the number of events in the stream."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            query = select(func.max(_COLUMNS.stream_version)).where(_COLUMNS.stream == stream)
            return int(connection.scalar(query) or self.base.versions.get(stream, 0))

    def scan(self, scan: Scan | None = None) -> Iterator[Row]:
        """Yield every row of the table that is there now, in order, checked and read, whatever is wrong with it.

        Args:
            scan: gives access to the state of the chain's check after each row; begins behind ``base``.

        Raises:
            Corrupt: the database is damaged.
            Unavailable: the database does not answer.
        """
        with closing(self.rows()) as stored:
            yield from (scan or Scan(self.base)).rows(stored)

    def rows(self) -> Generator[StoredRow]:
        """Yield every row of the table, in order, as it is stored.

        A caller that stops before the end closes the generator.

        Raises:
            Corrupt: the database is damaged.
            Unavailable: the database does not answer.
        """
        with database_errors(self._what):
            yield from every_row(self._database)

    def archived_rows(self) -> Iterator[StoredRow]:
        """Yield every row up to the base, in order, from the segments; a log that was never cut has none.

        Raises:
            Archived: a segment is not there.
            Corrupt: a segment was changed, or is of another log.
        """
        return self._archived.rows()

    def verify(self) -> ChainReport:
        """Check every row of the table: position, stream version, chain, times, and that columns and event agree.

        Raises:
            OlderVersion: an older version of the program wrote the log.
        """
        scan, problem = Scan(self.base), ""
        unknown: list[Skipped] = []
        try:
            problem = self.base_problem()
            for row in self.scan(scan):
                problem = problem or row.problem
                if row.skipped is not None:
                    unknown.append(row.skipped)
        except OlderVersion:
            raise
        except UnicronError as err:
            problem = problem or f"position {scan.check.position + 1}: {err.detail}"
        begins_after = self.base.position
        events = scan.check.position - begins_after
        return ChainReport(events, not problem, problem, scan.check.head, unknown, begins_after)

    def head(self) -> Head | None:
        """Return the place of the last event; None when the log is empty."""
        query = select(_COLUMNS.position, _COLUMNS.hash, _COLUMNS.recorded_at)
        with database_errors(self._what), self._database.engine.connect() as connection:
            row = connection.execute(query.order_by(_COLUMNS.position.desc()).limit(1)).first()
        if row is not None:
            return Head(row.position, row.hash, row.recorded_at)
        return Head(*self.base[:3]) if self.base.is_cut else None

    def hash_at(self, position: int) -> str | None:
        """Return the hash of the event at a position; None if the log has none there."""
        if self.base.is_cut and position == self.base.position:
            return self.base.hash
        if archived := self._archived.page(position - 1, 1):
            return str(archived[0].hash)
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
            found = [Head(*row) for row in connection.execute(query.order_by(_COLUMNS.position))]
        days = {head.recorded_at[:_DAY_LENGTH]: head for head in self._archived_heads(after, before)}
        return list((days | {head.recorded_at[:_DAY_LENGTH]: head for head in found}).values())

    def raw(self, *types: str, after: int = 0) -> Iterator[tuple[int, str, str]]:
        """Yield position, event id and JSON of the events of some types after a position, in order, as stored."""
        for stored in self._archived.rows(after):
            if stored.type in types:
                yield stored.position, stored.event_id, stored.data
        query = select(_COLUMNS.position, _COLUMNS.event_id, _COLUMNS.data).where(_COLUMNS.type.in_(types))
        if after:  # otherwise no lower bound, so that a row at a position below 1 is found
            query = query.where(_COLUMNS.position > after)
        with database_errors(self._what), self._database.engine.connect() as connection:
            for row in connection.execute(query.order_by(_COLUMNS.position).execution_options(yield_per=BATCH)):
                yield row.position, row.event_id, row.data

    def ids(self, *types: str, after: int = 0) -> list[tuple[int, str]]:
        """Return position and event id of the events of some types after a position, in order."""
        found = [(row.position, row.event_id) for row in self._archived.rows(after) if row.type in types]
        within = _COLUMNS.type.in_(types) & (_COLUMNS.position > after)
        query = select(_COLUMNS.position, _COLUMNS.event_id).where(within).order_by(_COLUMNS.position)
        with database_errors(self._what), self._database.engine.connect() as connection:
            return found + [(row.position, row.event_id) for row in connection.execute(query)]

    def doubled_ids(self) -> list[tuple[str, int, int]]:
        """Return the event ids that several rows have, with the first and the last of their positions.

        The unique index is not asked, since whoever changed the file may have changed the index.
        """
        stored = _COLUMNS.event_id + ""
        places = func.min(_COLUMNS.position), func.max(_COLUMNS.position)
        query = select(stored, *places).group_by(stored).having(func.count() > 1).order_by(places[1])
        with database_errors(self._what), self._database.engine.connect() as connection:
            return [(event_id, first, last) for event_id, first, last in connection.execute(query)]

    def lacking_guards(self) -> list[str]:
        """Return which triggers and constraints the table lacks that refuse changes, in words; empty if it has all."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            return lacking_guards(connection, self.base)

    def base_problem(self) -> str:
        """Return what is wrong with the base, in words; empty if nothing is."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            return base_problem(connection, self.base)

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

    def _archived_heads(self, after: int, before: date) -> Iterator[Head]:
        """Yield the archived events behind a position and before a day."""
        for row in self._archived.rows(after):
            if row.recorded_at < before.isoformat():
                yield Head(row.position, row.hash, row.recorded_at)

    def _commit(self, appends: Sequence[Append]) -> list[StoredRow]:
        """Commit appends in one transaction, or none of them; return the rows of all their events."""
        if not any(append.drafts for append in appends):
            return []
        with self._appending, database_errors(self._what), transaction(self._database) as opened:
            return write(opened, appends, self._clock, self.base)


def recorded(row: StoredRow) -> Recorded:
    """Return the record of a row. The event is read from its JSON, so that appending and reading give equal objects.

    Raises:
        Corrupt: the event cannot be read.
        NewerVersion: a version of the program beyond the next one wrote it, or one of other fields.
    """
    try:
        return record_of(row, parsed(row.type, row.data))
    except (ValidationError, ValueError, TypeError) as err:
        if (event := of_next_version(row.data)) is not None:
            return record_of(row, event)
        raise unreadable(row.position, row.data, err) from err
