"""The event log: one append-only SQL table with gapless positions and a hash chain.

    log.append([event])       one short transaction; the same event id twice appends once
    log.read(after=position)  records in order, a page; read_all() yields every record
    log.verify()              recomputes every hash, position and stream version

A reader never sees position n + 1 before n: a lock that lasts until the commit covers the choice of positions.
``schema`` defines the table and opens the database; ``relay`` and ``journal`` bring the records to the services.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection, func, insert, select

from shared.errors import Conflict, InvalidInput, UnicronError, VersionConflict
from shared.events import EVENT, Event, Recorded
from shared.log.chain import FIRST_HASH as FIRST_HASH
from shared.log.chain import ChainReport
from shared.log.chain import row_hash as row_hash
from shared.log.driver_errors import database_errors
from shared.log.scan import Row, Scan, record_of, utc_text
from shared.log.schema import COLUMNS, TABLE, Database, begin_write, checkpoint, lacking_guards
from shared.log.unreadable import Skipped, unreadable
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
        # Threads of this process wait for this lock, which wakes them at once; SQLite polls its own lock.
        self._appending = threading.Lock()

    def append(self, events: Sequence[Event], *, expected: Mapping[str, int] | None = None) -> list[Recorded]:
        """Append events in one transaction and return them with their places, in the order given.

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
        drafts = [_draft(event) for event in events]
        if not drafts:
            return []
        with self._appending, database_errors(self._what), self._database.writer.begin() as connection:
            begin_write(connection)
            known = _known(connection, drafts)
            new: list[dict[str, Any]] = []
            for draft in drafts:
                if (earlier := known.get(draft["event_id"])) is None:
                    known[draft["event_id"]] = draft
                    new.append(draft)
                elif not _same_event(earlier["data"], draft["data"]):
                    raise Conflict(f"event {draft['event_id']} is in the log with different content")
            if new:
                _check_versions(connection, expected or {})
                self._place(connection, new)
                connection.execute(insert(TABLE), new)
        return [_recorded(known[draft["event_id"]]) for draft in drafts]

    def read(self, *, after: int = 0, limit: int = 1000) -> list[Recorded]:
        """Return the records after position ``after``, in order, at most ``limit``.

        Raises:
            Corrupt: a record cannot be read back.
            NewerVersion: a newer version of the program wrote a record.
        """
        query = select(TABLE).where(_COLUMNS.position > after).order_by(_COLUMNS.position).limit(limit)
        with database_errors(self._what), self._database.engine.connect() as connection:
            rows = connection.execute(query).all()
        return [_recorded(row._asdict()) for row in rows]

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

    def raw(self, *types: str) -> Iterator[tuple[int, str, str]]:
        """Yield position, event id and JSON of the events of some types, in order, as they are stored."""
        query = select(_COLUMNS.position, _COLUMNS.event_id, _COLUMNS.data).where(_COLUMNS.type.in_(types))
        with database_errors(self._what), self._database.engine.connect() as connection:
            for row in connection.execute(query.order_by(_COLUMNS.position).execution_options(yield_per=_SCAN_BATCH)):
                yield row.position, row.event_id, row.data

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

    def _place(self, connection: Connection, drafts: Iterable[dict[str, Any]]) -> None:
        """Give each draft its position, stream version, time of recording and hashes."""
        query = select(_COLUMNS.position, _COLUMNS.hash, _COLUMNS.recorded_at)
        last = connection.execute(query.order_by(_COLUMNS.position.desc()).limit(1)).first()
        position, previous_hash, earliest = last if last is not None else (0, FIRST_HASH, "")
        recorded_at = max(utc_text(self._clock()), earliest)  # never falls, whatever the clock does
        versions: dict[str, int] = {}
        for draft in drafts:
            stream = draft["stream"]
            if stream not in versions:
                versions[stream] = _stream_version(connection, stream)
            versions[stream] += 1
            position += 1
            draft.update(
                position=position,
                stream_version=versions[stream],
                recorded_at=recorded_at,
                previous_hash=previous_hash,
            )
            draft["hash"] = previous_hash = row_hash(draft)


def _draft(event: Event) -> dict[str, Any]:
    """Return the columns that follow from the event alone.

    Raises:
        InvalidInput: the event cannot be stored.
    """
    try:
        data = event.canonical()
        data.encode()
    except ValueError as err:
        raise InvalidInput(f"event {event.event_id} cannot be written as JSON: {err}") from err
    if "\0" in event.event_id or "\0" in event.stream:
        raise InvalidInput(f"event {event.event_id!r}: a NUL character in its id or stream")
    if event.occurred_at.tzinfo is None:
        raise InvalidInput(f"event {event.event_id}: occurred_at has no time zone")
    return {
        "event_id": event.event_id,
        "stream": event.stream,
        "type": event.type,
        "schema_version": event.schema_version,
        "occurred_at": utc_text(event.occurred_at),
        "data": data,
    }


def _same_event(recorded: str, appended: str) -> bool:
    """Tell whether two events, as JSON, are equal once both have the present shape.

    An older version of this program may have recorded the event in another schema version, or without fields that have
    a default today.
    """
    if recorded == appended:
        return True
    try:
        return EVENT.validate_json(recorded).canonical() == appended
    except ValidationError:
        return False


def _known(connection: Connection, drafts: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows of the log that have the drafts' event ids, by event id."""
    query = select(TABLE).where(_COLUMNS.event_id.in_([draft["event_id"] for draft in drafts]))
    return {row.event_id: row._asdict() for row in connection.execute(query)}


def _check_versions(connection: Connection, expected: Mapping[str, int]) -> None:
    for stream, version in expected.items():
        actual = _stream_version(connection, stream)
        if actual != version:
            raise VersionConflict(
                f"stream {stream} has version {actual}, expected {version}",
                stream=stream,
                expected=version,
                actual=actual,
            )


def _stream_version(connection: Connection, stream: str) -> int:
    query = select(func.coalesce(func.max(_COLUMNS.stream_version), 0)).where(_COLUMNS.stream == stream)
    return int(connection.scalar(query) or 0)


def _recorded(row: Mapping[str, Any]) -> Recorded:
    """Return the record of a row. The event is read from its JSON, so that appending and reading give equal objects."""
    try:
        return record_of(row, EVENT.validate_json(row["data"]))
    except (ValidationError, ValueError, TypeError) as err:
        raise unreadable(row["position"], row["data"], err) from err
