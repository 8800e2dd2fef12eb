"""The transaction that appends: all appends are checked, and then written together; a conflict leaves nothing.

    with transaction(database) as opened:
        write(opened, appends, clock, database.base)

The transaction has the writer's lock until its commit. The statements are text, and those for SQLite go to its driver:
an append has several, and SQLAlchemy takes more time for each than SQLite does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json
from sqlalchemy import Connection

from shared.errors import Conflict, InvalidInput, LeaseLost, VersionConflict
from shared.events.union import EVENT, Event
from shared.log.base import Base
from shared.log.chain import new_hash
from shared.log.lease import TOKENS, Lease
from shared.log.scan import utc_text
from shared.log.schema import COLUMNS, Database, StoredRow, begin_write, stored_row
from shared.model import Clock


class Draft(NamedTuple):
    """The columns of a row that follow from its event alone."""

    event_id: str
    stream: str
    type: str
    schema_version: int
    occurred_at: str
    data: str


class Append(NamedTuple):
    """The events of one call of ``EventLog.append``.

    ``drafts``: each event before it has a place. ``expected``: stream -> version that it must have. ``recorded_at``: in
    a simulated history, when they are recorded; None: the clock says. ``lease``: what the service that appends must
    still hold; None: it needs none.
    """

    drafts: list[Draft]
    expected: Mapping[str, int]
    recorded_at: datetime | None = None
    lease: Lease | None = None


_LAST = "SELECT position, hash, recorded_at FROM log ORDER BY position DESC LIMIT 1"
_ROWS = f"SELECT {', '.join(COLUMNS)} FROM log"  # nosec B608 # made of constants, as are those below
# A maximum of its own for each stream: the index has it at its end, where GROUP BY reads all entries of the stream.
_VERSION = "(SELECT max(stream_version) FROM log WHERE stream = streams.value)"
_INSERT = f"INSERT INTO log ({', '.join(COLUMNS)}) VALUES"


class _Sqlite:
    """A write transaction of SQLite. Its driver takes no lists as parameters; JSON is one."""

    _KNOWN = f"{_ROWS} WHERE event_id IN (SELECT value FROM json_each(?))"  # nosec B608
    _VERSIONS = f"SELECT value, {_VERSION} FROM json_each(?) AS streams"  # nosec B608
    _INSERT = f"{_INSERT} ({', '.join('?' * len(COLUMNS))})"

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def last(self) -> list[Any]:
        """Return position, hash and time of the last row, in a list; an empty one if there is no row."""
        return list(self._cursor.execute(_LAST))

    def tokens(self) -> list[Any]:
        """Return each service that has a lease, with its newest token."""
        return list(self._cursor.execute(TOKENS))

    def known(self, event_ids: Iterable[str]) -> list[Any]:
        """Return the rows that have these event ids."""
        return list(self._cursor.execute(self._KNOWN, (json.dumps(list(event_ids)),)))

    def versions(self, streams: Iterable[str]) -> list[Any]:
        """Return each stream with its newest version; None if the stream has no event."""
        return list(self._cursor.execute(self._VERSIONS, (json.dumps(list(streams)),)))

    def insert(self, rows: list[StoredRow]) -> None:
        """Insert rows."""
        self._cursor.executemany(self._INSERT, rows)


class _Postgresql:
    """A write transaction of PostgreSQL, with the same methods as that of SQLite."""

    _KNOWN = f"{_ROWS} WHERE event_id = ANY(%s)"
    _VERSIONS = f"SELECT value, {_VERSION} FROM unnest(%s::text[]) AS streams (value)"  # nosec B608
    _INSERT = f"{_INSERT} ({', '.join(['%s'] * len(COLUMNS))})"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def last(self) -> list[Any]:
        return list(self._connection.exec_driver_sql(_LAST))

    def tokens(self) -> list[Any]:
        return list(self._connection.exec_driver_sql(TOKENS))

    def known(self, event_ids: Iterable[str]) -> list[Any]:
        return list(self._connection.exec_driver_sql(self._KNOWN, (list(event_ids),)))

    def versions(self, streams: Iterable[str]) -> list[Any]:
        return list(self._connection.exec_driver_sql(self._VERSIONS, (list(streams),)))

    def insert(self, rows: list[StoredRow]) -> None:
        self._connection.exec_driver_sql(self._INSERT, [tuple(row) for row in rows])


Transaction = _Sqlite | _Postgresql


@contextlib.contextmanager
def transaction(database: Database) -> Iterator[Transaction]:
    """Return a write transaction that has the writer's lock; it is committed at the end of the block.

    Raises:
        DBAPIError: an error of PostgreSQL's driver, by SQLAlchemy. sqlite3.Error: an error of SQLite.
    """
    if not database.sqlite:
        with database.writer.begin() as opened:
            begin_write(opened)
            yield _Postgresql(opened)
        return
    connection = database.engine.raw_connection()
    try:
        cursor = connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        yield _Sqlite(cursor)
        cursor.execute("COMMIT")
    finally:
        connection.close()  # back to the pool, which rolls back what was not committed


def draft(event: Event) -> Draft:
    """Return the draft of an event.

    Raises:
        InvalidInput: the event cannot be stored.
    """
    try:
        data = event.canonical()
        data.encode()
    except ValueError as err:
        raise InvalidInput(f"event {event.event_id} cannot be written as JSON: {err}") from err
    stream = event.stream
    if "\0" in event.event_id or "\0" in stream:
        raise InvalidInput(f"event {event.event_id!r}: a NUL character in its id or stream")
    if event.occurred_at.tzinfo is None:
        raise InvalidInput(f"event {event.event_id}: occurred_at has no time zone")
    return Draft(event.event_id, stream, event.type, event.schema_version, utc_text(event.occurred_at), data)


def write(opened: Transaction, appends: Sequence[Append], clock: Clock, base: Base) -> list[StoredRow]:
    """Write appends, in order; return the rows of all their events.

    Args:
        opened: has the writer's lock.
        appends: in the order in which they came.
        clock: source of ``recorded_at`` where an append has none of its own; the transaction has one.
        base: the place behind which the table begins.

    Raises:
        Conflict: as ``_Writer.take``.
    """
    writer = _Writer(opened, appends, clock, base)
    rows = [row for append in appends for row in writer.take(append)]
    if writer.new:
        opened.insert(writer.new)
    return rows


class _Writer:
    """The end of the log in one transaction, as the appends before have left it. ``new``: the rows to insert."""

    def __init__(self, opened: Transaction, appends: Sequence[Append], clock: Clock, base: Base) -> None:
        self.new: list[StoredRow] = []
        drafts = [draft for append in appends for draft in append.drafts]
        found = map(stored_row, opened.known({draft.event_id for draft in drafts}))
        self._known: dict[str, StoredRow] = {row.event_id: row for row in found}
        """The rows that have the appends' event ids, by event id."""
        streams = {draft.stream for draft in drafts if draft.event_id not in self._known}
        streams.update(stream for append in appends for stream in append.expected)
        found_versions = opened.versions(streams)
        self._versions = {stream: version or base.versions.get(stream, 0) for stream, version in found_versions}
        last = opened.last()
        place: tuple[int, str, str] = tuple(last[0]) if last else base[:3]
        self._position, self._hash, self._recorded_at = place
        self._now = utc_text(clock())
        leased = any(append.lease is not None for append in appends)
        self._tokens: dict[str, int] = dict(opened.tokens()) if leased else {}

    def take(self, append: Append) -> list[StoredRow]:
        """Give the new events of an append their places; return the rows of all of them.

        Raises:
            Conflict: an event id is in the log with other content, or a stream has another version.
            LeaseLost: another instance of the service has taken the lease.
        """
        if append.lease is not None and self._tokens.get(append.lease.service) != append.lease.token:
            raise lease_lost(append.lease, self._tokens.get(append.lease.service, 0))
        new: dict[str, Draft] = {}
        for draft in append.drafts:
            earlier = self._known.get(draft.event_id) or new.setdefault(draft.event_id, draft)
            if not _same_event(earlier.data, draft.data):
                raise Conflict(f"event {draft.event_id} is in the log with different content")
        if new:
            self._check_versions(append.expected)
            at = self._now if append.recorded_at is None else utc_text(append.recorded_at)
            self._recorded_at = max(at, self._recorded_at)  # the time never falls, whatever the clock does
            self._place(new.values())
        return [self._known[draft.event_id] for draft in append.drafts]

    def _check_versions(self, expected: Mapping[str, int]) -> None:
        for stream, version in expected.items():
            if (actual := self._versions.get(stream, 0)) != version:
                raise VersionConflict(
                    f"stream {stream} has version {actual}, expected {version}",
                    stream=stream,
                    expected=version,
                    actual=actual,
                )

    def _place(self, drafts: Iterable[Draft]) -> None:
        """Give each draft its position, stream version, time of recording and hashes."""
        for event_id, stream, kind, schema_version, occurred_at, data in drafts:
            self._position += 1
            version = self._versions[stream] = self._versions[stream] + 1
            place = self._position, event_id, stream, version, kind, schema_version, occurred_at, self._recorded_at
            self._hash = new_hash(columns := (*place, data, self._hash))
            self._known[event_id] = row = stored_row((*columns, self._hash))
            self.new.append(row)


def lease_lost(lease: Lease, newest: int) -> LeaseLost:
    """Return the error of a holder whose lease has a newer token."""
    return LeaseLost(
        f"another {lease.service} has taken the lease: its token is {newest}, this process has {lease.token}",
        service=lease.service,
    )


def _same_event(recorded: str, appended: str) -> bool:
    """Tell whether two events, as JSON, are equal once both have the present shape.

    An older version of this program may have recorded the event in another schema version, or without fields that have
    a default today. The version before or after this one, which is active beside it during an upgrade, has decided the
    same event if it says the same of all that both know.
    """
    if recorded == appended:
        return True
    with contextlib.suppress(ValidationError):
        if EVENT.validate_json(recorded).canonical() == appended:
            return True
    try:
        one, other = from_json(recorded), from_json(appended)
        return bool(one.pop("schema_version") != other.pop("schema_version")) and _agree(one, other)
    except (ValueError, KeyError, AttributeError):  # what is recorded is damaged
        return False


def _agree(one: Any, other: Any) -> bool:
    """Tell whether two values, as JSON has them, are equal but for fields that one of them lacks."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_agree(one[name], other[name]) for name in one.keys() & other.keys())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    return bool(one == other)
