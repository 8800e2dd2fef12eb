"""Events as the interface shows them: the JSON of a row of the log.

The text of an event in the log is what the interface shows of it, but for two differences: an event of an older version
may lack fields that have a default today, and plans are shorter there (``PlanDecided.canonical``). An event whose text
can have neither is not parsed into its model and written again: its text is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import from_json, to_json

from shared.events.union import EVENT_CLASSES, Recorded
from shared.interface.models import EventRecord
from shared.log.log import recorded
from shared.log.schema import StoredRow
from shared.text import iso


def _kinds() -> Iterator[tuple[str, tuple[int, frozenset[str]]]]:
    """Yield the event types without an inner model, each with its schema version and its fields."""
    for kind in EVENT_CLASSES:
        fields = kind.model_fields
        if not any(_has_model(field.annotation) for field in fields.values()):
            yield fields["type"].default, (fields["schema_version"].default, frozenset(fields))


def _has_model(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(_has_model(part) for part in get_args(annotation))


_FLAT = dict(_kinds())

_PLACE = ("position", "stream", "stream_version", "type", "previous_hash", "hash")


def event_json(row: StoredRow) -> str:
    """Return the JSON of ``EventRecord`` for a row of the log.

    Raises:
        Corrupt: the event cannot be read.
        NewerVersion: a newer version of the program wrote it.
    """
    try:
        plain = _is_plain(row)
        at = iso(datetime.fromisoformat(row.recorded_at))
    except (ValueError, TypeError):
        plain = False  # the record says what is wrong with it
    if not plain:
        return show(recorded(row)).model_dump_json()
    place = {name: getattr(row, name) for name in _PLACE}
    return f'{to_json({**place, "recorded_at": at})[:-1].decode()},"event":{row.data}}}'


def _is_plain(row: StoredRow) -> bool:
    """Return whether the interface shows the event as it is stored: all of its fields, and no others, are there."""
    known = _FLAT.get(row.type)
    if known is None:
        return False
    event = from_json(row.data)
    # A code that is not known here is shown as another one (``shared.events.codes``).
    return (event["schema_version"], event.keys()) == known and event["type"] == row.type and not event.get("code")


def show(record: Recorded) -> EventRecord:
    """Return a record as the interface shows it."""
    event: dict[str, Any] = record.event.model_dump(mode="json", by_alias=True)
    return EventRecord(
        position=record.position,
        stream=record.stream,
        stream_version=record.stream_version,
        recorded_at=record.recorded_at,
        type=event["type"],
        event=event,
        previous_hash=record.previous_hash,
        hash=record.hash,
    )
