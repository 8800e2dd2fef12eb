"""The whole log in one pass: each row is checked and read once, and nothing ends the pass but the database.

Services read by ``EventLog.read``, where an event that is not known, or that is damaged, is an error. Who examines a
log (``unicron replay``) goes on behind it and says what is wrong or was skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from shared.errors import NewerVersion
from shared.events import EVENT, Event, Recorded
from shared.log.chain import ChainCheck
from shared.log.unreadable import Skipped, known_part, skipped, unreadable
from shared.model import made

_FIELDS = set(Recorded.model_fields)

_TIME_LENGTH = len("2024-01-01T00:00:00.000000+00:00")


class Row(NamedTuple):
    """A row of a scan.

    ``problem``: what is wrong with the row, in words; empty if nothing is. ``skipped``: what a newer version of the
    program wrote there. ``record``: the event as far as it is known here; None if it cannot be read.
    """

    position: int
    hash: str
    recorded_at: str
    record: Recorded | None
    problem: str
    skipped: Skipped | None


class Scan:
    """The rows of one pass, in order, each given to ``next``. ``check``: the state of the chain's check."""

    def __init__(self) -> None:
        self.check = ChainCheck()

    def next(self, row: Mapping[str, Any]) -> Row:
        """Check and read the next row."""
        problem = self.check.next(row)
        event, unknown, defect = _read(row)
        if event is not None and not defect:
            defect = _contradiction(row, event)
        problem = problem or defect
        if problem:
            self.check.broken()
        self.check.intact(row)
        record = None
        if event is not None:
            try:
                record = record_of(row, event)
            except (TypeError, ValueError):
                self.check.broken()
                problem = problem or f"position {row['position']}: recorded_at is no time"
        return Row(row["position"], row["hash"], row["recorded_at"], record, problem, unknown)


def record_of(row: Mapping[str, Any], event: Event) -> Recorded:
    """Return the record of a row whose event has been read.

    Raises:
        ValueError: ``recorded_at`` is no time.
        TypeError: it is no text.
    """
    values = {
        "position": row["position"],
        "stream": row["stream"],
        "stream_version": row["stream_version"],
        "recorded_at": datetime.fromisoformat(row["recorded_at"]),
        "event": event,
        "previous_hash": row["previous_hash"],
        "hash": row["hash"],
    }
    return made(Recorded, values, _FIELDS)


def utc_text(moment: datetime) -> str:
    """Return ISO 8601 text in UTC with microseconds: of fixed width, so that the order of texts is that of times."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def _read(row: Mapping[str, Any]) -> tuple[Event | None, Skipped | None, str]:
    """Return the event as far as it is known here, what was skipped of it, and why it cannot be read."""
    try:
        return EVENT.validate_json(row["data"]), None, ""
    except (ValidationError, ValueError, TypeError) as err:
        error = unreadable(row["position"], row["data"], err)
        if not isinstance(error, NewerVersion):
            return None, None, error.detail
        known = known_part(row["data"], err)
        return known, skipped(error, whole=known is None), ""


def _contradiction(row: Mapping[str, Any], event: Event) -> str:
    """Return which column contradicts the event; empty if none does.

    The stored JSON is not compared with the event's: an event of an older version of this program may lack fields that
    have a default today.
    """
    if event.occurred_at.tzinfo is None:
        return f"position {row['position']}: occurred_at has no time zone"
    for name in ("event_id", "stream", "type"):
        if row[name] != getattr(event, name):
            return f"position {row['position']}: column {name} contradicts the event"
    if row["schema_version"] != _stored_version(row, event):
        return f"position {row['position']}: column schema_version contradicts the event"
    if not _is_time(row["occurred_at"], event.occurred_at):
        return f"position {row['position']}: column occurred_at contradicts the event"
    return ""


def _stored_version(row: Mapping[str, Any], event: Event) -> int:
    """Return the schema version of the event as it is stored; the event that was read may have been upcast."""
    newest = event.schema_version
    if newest == 1 or (row["schema_version"] == newest and f'"schema_version":{newest}' in row["data"]):
        return newest  # the stored text repeats the column: it need not be parsed once more
    return int(from_json(row["data"]).get("schema_version", newest))


def _is_time(text: object, moment: datetime) -> bool:
    """Return whether a text is what ``utc_text`` makes of a moment; cheaper than to make it."""
    if not isinstance(text, str) or len(text) != _TIME_LENGTH or text[10] != "T" or not text.endswith("+00:00"):
        return False
    return datetime.fromisoformat(text) == moment
