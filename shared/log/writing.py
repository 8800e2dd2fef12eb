"""The transaction that appends: each append is checked by itself, and those that pass are written together.

``log`` opens the transaction, in which ``write`` runs, with the writer's lock, which lasts until the commit. The
statements are text, since one append has several and the time of the expression language is more than theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection

from shared.errors import Conflict, InvalidInput, VersionConflict
from shared.events import EVENT, Event
from shared.log.chain import FIRST_HASH, row_hash
from shared.log.scan import utc_text
from shared.log.schema import COLUMNS
from shared.model import Clock

Columns = dict[str, Any]
"""The columns of one row by name."""


@dataclass(eq=False, slots=True)
class Append:
    """The events of one call of ``EventLog.append``.

    ``drafts``: the columns of each that follow from the event alone. ``expected``: stream -> version that it must have.
    ``rows``: once committed, the rows of all events, in the order given. ``error``: why nothing of it was appended.
    """

    drafts: list[Columns]
    expected: Mapping[str, int]
    rows: list[Columns] = field(default_factory=list)
    error: Exception | None = None


class _Statements(NamedTuple):
    """SQL of one database. ``known`` has a list of event ids as its parameter, ``versions`` one of streams."""

    last: str
    known: str
    versions: str
    insert: str


_LAST = "SELECT position, hash, recorded_at FROM log ORDER BY position DESC LIMIT 1"
_ROWS = f"SELECT {', '.join(COLUMNS)} FROM log"
# A maximum of its own for each stream: the index has it at its end, where GROUP BY reads all entries of the stream.
_VERSION = "(SELECT max(stream_version) FROM log WHERE stream = streams.value)"
_INSERT = f"INSERT INTO log ({', '.join(COLUMNS)}) VALUES"

_SQLITE = _Statements(
    last=_LAST,
    known=f"{_ROWS} WHERE event_id IN (SELECT value FROM json_each(?))",
    versions=f"SELECT value, {_VERSION} FROM json_each(?) AS streams",
    insert=f"{_INSERT} ({', '.join('?' * len(COLUMNS))})",
)
_POSTGRESQL = _Statements(
    last=_LAST,
    known=f"{_ROWS} WHERE event_id = ANY(%s)",
    versions=f"SELECT value, {_VERSION} FROM unnest(%s::text[]) AS streams (value)",
    insert=f"{_INSERT} ({', '.join(['%s'] * len(COLUMNS))})",
)


def draft(event: Event) -> Columns:
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


def write(connection: Connection, appends: Sequence[Append], clock: Clock) -> None:
    """Write the appends that have no conflict, in order; note the rows of each, or its error.

    Args:
        connection: in a transaction that has the writer's lock.
        appends: in the order in which they came.
        clock: source of ``recorded_at``.
    """
    writer = _Writer(connection, appends, clock)
    for append in appends:
        append.error = None
        try:
            append.rows = writer.take(append)
        except Conflict as err:
            append.error = err
    writer.insert()


class _Writer:
    """The end of the log in one transaction, as the appends before have left it."""

    def __init__(self, connection: Connection, appends: Sequence[Append], clock: Clock) -> None:
        self._connection = connection
        self._sql = _POSTGRESQL if connection.dialect.name == "postgresql" else _SQLITE
        self._clock = clock
        self._new: list[Columns] = []
        found = self._list(self._sql.known, {draft["event_id"] for append in appends for draft in append.drafts})
        self._known: dict[str, Columns] = {row[1]: dict(zip(COLUMNS, row, strict=True)) for row in found}
        """The rows that have the appends' event ids, by event id."""
        streams = {draft["stream"] for append in appends for draft in append.drafts if not self._is_known(draft)}
        streams.update(stream for append in appends for stream in append.expected)
        self._versions = {stream: version or 0 for stream, version in self._list(self._sql.versions, streams)}
        last = connection.exec_driver_sql(self._sql.last).first()
        place: tuple[int, str, str] = tuple(last) if last is not None else (0, FIRST_HASH, "")
        self._position, self._hash, self._recorded_at = place

    def take(self, append: Append) -> list[Columns]:
        """Give the new events of an append their places; return the rows of all of them.

        Raises:
            Conflict: an event id is in the log with other content, or a stream has another version; nothing changed.
        """
        new: dict[str, Columns] = {}
        for draft in append.drafts:
            earlier = self._known.get(draft["event_id"]) or new.setdefault(draft["event_id"], draft)
            if not _same_event(earlier["data"], draft["data"]):
                raise Conflict(f"event {draft['event_id']} is in the log with different content")
        if new:
            self._check_versions(append.expected)
            self._place(new.values())
            self._known.update(new)
        return [self._known[draft["event_id"]] for draft in append.drafts]

    def insert(self) -> None:
        """Insert the rows of all appends that were taken."""
        if self._new:
            rows = [tuple(row[name] for name in COLUMNS) for row in self._new]
            self._connection.exec_driver_sql(self._sql.insert, rows)

    def _is_known(self, draft: Columns) -> bool:
        return draft["event_id"] in self._known

    def _list(self, statement: str, values: set[str]) -> Sequence[Any]:
        """Return the rows of a statement that has a list of texts as its parameter."""
        if not values:
            return []
        # The driver of SQLite takes no lists; JSON is one.
        parameter: Any = json.dumps(sorted(values)) if self._sql is _SQLITE else sorted(values)
        return self._connection.exec_driver_sql(statement, (parameter,)).all()

    def _check_versions(self, expected: Mapping[str, int]) -> None:
        for stream, version in expected.items():
            if (actual := self._versions.get(stream, 0)) != version:
                raise VersionConflict(
                    f"stream {stream} has version {actual}, expected {version}",
                    stream=stream,
                    expected=version,
                    actual=actual,
                )

    def _place(self, drafts: Iterable[Columns]) -> None:
        """Give each draft its position, stream version, time of recording and hashes."""
        self._recorded_at = max(utc_text(self._clock()), self._recorded_at)  # never falls, whatever the clock does
        for draft in drafts:
            self._position += 1
            self._versions[draft["stream"]] += 1
            draft.update(
                position=self._position,
                stream_version=self._versions[draft["stream"]],
                recorded_at=self._recorded_at,
                previous_hash=self._hash,
            )
            draft["hash"] = self._hash = row_hash(draft)
            self._new.append(draft)


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
