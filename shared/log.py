"""The event log: one append-only table, gapless positions, a hash chain (DESIGN section 6, "The log is the truth").

    log.append([event])       one short transaction; the same event id twice appends once
    log.read(after=position)  in order
    log.verify()              recomputes every hash, position and stream version

A reader never sees position n + 1 before n: positions are given under a lock that is held until the commit.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, func, insert, select

from shared.errors import Conflict, Corrupt, InvalidInput, UnicronError, VersionConflict
from shared.events import EVENT, Event, Recorded
from shared.log_schema import COLUMNS, TABLE, Database, begin_write, checkpoint, database_errors
from shared.model import Clock, canonical_json, utc_now

FIRST_HASH = "0" * 64
"""``previous_hash`` of the first row."""

_VERIFY_BATCH = 500
"""Rows fetched at once while verifying: bounds the memory, whatever the size of the log."""

_COLUMNS = TABLE.c


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What ``verify`` found. ``events``: rows that hold; ``problem``: where and why the next one does not.

    ``head``: hash of the last row that holds. Rows cut off at the end leave a valid, shorter chain; who needs to
    notice that compares ``head`` with one noted before.
    """

    events: int
    ok: bool
    problem: str
    head: str = FIRST_HASH


def row_hash(values: Mapping[str, Any]) -> str:
    """Return the hash of a row: SHA-256 over the canonical JSON of all its other columns, in the table's order."""
    text = canonical_json([values[name] for name in COLUMNS if name != "hash"])
    return hashlib.sha256(text.encode()).hexdigest()


class EventLog:
    """The log in SQLite (``sqlite:///PATH``) or PostgreSQL (``postgresql+psycopg://...``); safe to use from threads.

    Args:
        url: SQLAlchemy URL.
        read_only: read a live log or a copied file; nothing is created or modified.
        clock: where ``recorded_at`` comes from.

    Raises:
        NotFound: read-only, and there is no such file.
        Corrupt: the database is damaged or is not a log.
        Unavailable: the database does not answer.
    """

    def __init__(self, url: str, *, read_only: bool = False, clock: Clock = utc_now) -> None:
        self.url = url
        self._database = Database(url, read_only=read_only)
        self._what = f"log {self._database.name}"
        self._clock = clock
        self._read_only = read_only
        self._checkpointed = 0
        # Threads of this process queue here, where waking is immediate; SQLite's own lock is polled.
        self._appending = threading.Lock()

    def append(self, events: Sequence[Event], *, expected: Mapping[str, int] | None = None) -> list[Recorded]:
        """Append events in one transaction and return them with their places, in the order given.

        An event whose id is in the log already is not appended again: its record is returned. ``expected`` is checked
        unless there is nothing new to append.

        Args:
            events: any number of events; none is allowed.
            expected: stream -> version the stream must have now.

        Raises:
            VersionConflict: a stream has another version; nothing was appended.
            Conflict: an event id is in the log with different content; nothing was appended.
            InvalidInput: an event cannot be stored (a naive time, text that is not Unicode).
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
                elif earlier["data"] != draft["data"]:
                    raise Conflict(f"event {draft['event_id']} is in the log with different content")
            if new:
                _check_versions(connection, expected or {})
                self._place(connection, new)
                connection.execute(insert(TABLE), new)
        return [_recorded(known[draft["event_id"]]) for draft in drafts]

    def read(self, *, after: int = 0, limit: int = 1000) -> list[Recorded]:
        """Return at most ``limit`` records behind position ``after``, in order.

        Raises:
            Corrupt: a record cannot be read back.
        """
        query = select(TABLE).where(_COLUMNS.position > after).order_by(_COLUMNS.position).limit(limit)
        with database_errors(self._what), self._database.engine.connect() as connection:
            rows = connection.execute(query).all()
        return [_recorded(row._asdict()) for row in rows]

    def last_position(self) -> int:
        """Return the position of the last event; 0 when the log is empty."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            return int(connection.scalar(select(func.coalesce(func.max(_COLUMNS.position), 0))) or 0)

    def stream_version(self, stream: str) -> int:
        """Return the number of events in the stream."""
        with database_errors(self._what), self._database.engine.connect() as connection:
            return _stream_version(connection, stream)

    def verify(self) -> ChainReport:
        """Check every row: position, stream version, hash chain, times, and that the columns repeat the event."""
        check = _ChainCheck()
        try:
            with database_errors(self._what), self._database.engine.connect() as connection:
                # No lower bound: a row moved to a position below 1 is seen.
                query = select(TABLE).order_by(_COLUMNS.position).execution_options(yield_per=_VERIFY_BATCH)
                for row in connection.execute(query):
                    if problem := check.next(row._asdict()):
                        return ChainReport(check.events, False, problem, check.head)
        except UnicronError as err:
            return ChainReport(check.events, False, f"position {check.events + 1}: {err.detail}", check.head)
        return ChainReport(check.events, True, "", check.head)

    def checkpoint(self) -> None:
        """Bring SQLite's main file up to date if events were appended, so that a copy of it alone is nearly complete.

        PostgreSQL needs none.
        """
        if self._database.sqlite and not self._read_only and (last := self.last_position()) != self._checkpointed:
            with database_errors(self._what):
                checkpoint(self._database.engine)
            self._checkpointed = last

    def close(self) -> None:
        """Close the database; the last one to close an SQLite log leaves a single file."""
        self._database.close()

    def _place(self, connection: Connection, drafts: Iterable[dict[str, Any]]) -> None:
        """Give each draft its position, stream version, time of recording and hashes."""
        query = select(_COLUMNS.position, _COLUMNS.hash, _COLUMNS.recorded_at)
        last = connection.execute(query.order_by(_COLUMNS.position.desc()).limit(1)).first()
        position, previous_hash, earliest = last if last is not None else (0, FIRST_HASH, "")
        recorded_at = max(_utc_text(self._clock()), earliest)  # never backwards, whatever the clock does
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


class _ChainCheck:
    """Folds rows; remembers what the next one must continue."""

    def __init__(self) -> None:
        self.events = 0
        self.head = FIRST_HASH
        self._recorded_at = ""
        self._versions: dict[str, int] = {}

    def next(self, row: Mapping[str, Any]) -> str:
        """Return what is wrong with the row, or nothing and count it."""
        try:
            return self._next(row)
        except (TypeError, ValueError) as err:
            return f"position {self.events + 1}: a column holds what no event has ({err})"

    def _next(self, row: Mapping[str, Any]) -> str:
        position, stream = self.events + 1, row["stream"]
        version = self._versions.get(stream, 0) + 1
        if row["position"] != position:
            return f"position {position} is missing: {row['position']!r} follows {self.events}"
        if row["previous_hash"] != self.head:
            return f"position {position}: previous_hash is not the hash of the row before"
        computed = row_hash(row)
        if row["hash"] != computed:
            return f"position {position}: the row does not match its hash"
        if row["stream_version"] != version:
            return f"position {position}: version {row['stream_version']} of stream {stream}, expected {version}"
        if row["recorded_at"] < self._recorded_at:
            return f"position {position}: recorded before the row that precedes it"
        try:
            draft = _draft(EVENT.validate_json(row["data"]))
        except (ValidationError, InvalidInput) as err:
            return f"position {position}: not an event ({err})"
        # Not `data`: an event of an older version of this program may lack fields that have a default today.
        if different := [name for name, value in draft.items() if name != "data" and row[name] != value]:
            return f"position {position}: column {different[0]} contradicts the event"
        self.events = position
        self.head = computed
        self._recorded_at = row["recorded_at"]
        self._versions[stream] = version
        return ""


def _draft(event: Event) -> dict[str, Any]:
    """Return the columns that the event alone determines."""
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
        "occurred_at": _utc_text(event.occurred_at),
        "data": data,
    }


def _utc_text(moment: datetime) -> str:
    """Return ISO 8601 in UTC with microseconds: a fixed width, so that text order is time order."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _known(connection: Connection, drafts: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows that are in the log already, by event id."""
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
    """Return a row as a record; the event is read from its JSON, so that appending and reading give equal objects."""
    try:
        return Recorded.model_construct(
            position=row["position"],
            stream=row["stream"],
            stream_version=row["stream_version"],
            recorded_at=datetime.fromisoformat(row["recorded_at"]),
            event=EVENT.validate_json(row["data"]),
            previous_hash=row["previous_hash"],
            hash=row["hash"],
        )
    except (ValidationError, ValueError, TypeError) as err:
        raise Corrupt(f"position {row['position']}: not an event ({err})") from err
