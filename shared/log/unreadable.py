"""Why a record of the log cannot be read: it is damaged, or a newer or an older version of the program has written it.

A new field of an event raises its schema version by one, and an event means the same to a reader that ignores the
field: so a service reads what the next version of the program writes (``of_next_version``), and old and new instances
share a log while a cluster is upgraded. The log is stricter than the bus (``shared.bus.messages``) in all else: a
service that skips an event, or a field that its version should know, would decide otherwise than the one that wrote it.
Such a record is an error, which names its position, type and version. A program that examines a log goes on behind what
a newer version has written (``shared.log.scan``), with the part that is known. A log with an event of an older version
than is readable here is refused as a whole: what follows could not be judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from shared.bus.messages import shown
from shared.errors import Corrupt, NewerVersion, OlderVersion, UnicronError
from shared.events.union import EVENT, EVENT_CLASSES, OLDEST_DECIDER, Event
from shared.events.upcast import oldest
from shared.model import canonical_json

NEWEST: dict[str, int] = {
    event.model_fields["type"].default: event.model_fields["schema_version"].default for event in EVENT_CLASSES
}
"""Event type -> the newest schema version that this program knows."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was skipped of an event that a newer version of the program wrote.

    ``what``: the event, and which part of it is not known, in words. ``whole``: whether all of the event was skipped.
    """

    position: int
    type: str | None
    schema_version: int | None
    what: str
    whole: bool


def unreadable(position: object, data: object, err: Exception) -> UnicronError:
    """Return the error of a record whose event cannot be parsed.

    Args:
        position: the record's.
        data: the event as it is stored.
        err: the parser's error.

    Returns:
        ``NewerVersion`` if the event has a type, a schema version or a field that this program does not know;
        ``OlderVersion`` if its schema version, or a plan's decider, is older than this program reads; else
        ``Corrupt``.
    """
    try:
        event = from_json(data) if isinstance(data, str) else None
    except (ValueError, TypeError):  # TypeError: the bytes are no Unicode
        event = None
    if not isinstance(event, dict):
        return Corrupt(f"position {position}: not an event ({_sentence(err)})")
    kind, version = event.get("type"), event.get("schema_version")
    what = f"position {position}: event {shown(kind)}, schema version {shown(version)}"
    if outdated := _outdated(event):
        return OlderVersion(
            f"{what}: {outdated}; an older version of Unicron has written this log, and is needed to read it: go on "
            "with that version, or begin an empty log with this one",
            position=position,
        )
    if unknown := _unknown(kind, version, err):
        return NewerVersion(
            f"{what}: {unknown}; a newer version of Unicron has written this log, and is needed to read it",
            position=position,
            type=kind if isinstance(kind, str) else None,
            schema_version=version if isinstance(version, int) else None,
            unknown=f"{what}: {unknown}",
        )
    return Corrupt(f"{what}: not an event ({_sentence(err)})")


def of_next_version(data: object) -> Event | None:
    """Return an event that the next version of the program wrote, without its new fields; None if it is no such event.

    Args:
        data: the event as it is stored.
    """
    try:
        event = from_json(data) if isinstance(data, str) else None
        if not isinstance(event, dict) or event.get("schema_version") != (known := NEWEST[event["type"]]) + 1:
            return None
        return EVENT.validate_json(canonical_json({**event, "schema_version": known}), extra="ignore")
    except (ValueError, TypeError, KeyError):  # a validation error is a ValueError
        return None


def skipped(error: NewerVersion, *, whole: bool) -> Skipped:
    """Return what was skipped because of an error of ``unreadable``."""
    extra = error.extra
    return Skipped(extra["position"], extra["type"], extra["schema_version"], extra["unknown"], whole)


def known_part(data: str, err: Exception) -> Event | None:
    """Return the event without the fields that are not known here; None if more than fields is unknown.

    Args:
        data: the event as it is stored.
        err: the parser's error.
    """
    if (event_of_next := of_next_version(data)) is not None:
        return event_of_next
    event = from_json(data)
    if _unknown(event.get("type"), event.get("schema_version"), ValueError()):
        return None
    try:
        for path in _unknown_paths(err):
            inner = event
            for key in path[:-1]:
                inner = inner[key]
            del inner[path[-1]]
        return EVENT.validate_python(event, strict=False)
    except (ValidationError, KeyError, IndexError, TypeError):
        return None


def _unknown(kind: object, version: object, err: Exception) -> str:
    """Return what this program does not know of an event, in words; empty if it knows everything."""
    if isinstance(kind, str) and kind not in NEWEST:
        return "its type is not known here"
    if isinstance(kind, str) and isinstance(version, int) and version > NEWEST[kind]:
        return f"version {NEWEST[kind]} is the newest known here"
    fields = [".".join(str(part) for part in path) for path in _unknown_paths(err)]
    return f"not known here: {', '.join(fields)}" if fields else ""


def _outdated(event: dict[str, Any]) -> str:
    """Return what is too old of an event of a type that is known here, in words; empty if nothing is."""
    kind, version, decider = event.get("type"), event.get("schema_version"), event.get("decider", 1)
    if not isinstance(version, int) or kind not in NEWEST:
        return ""
    if 0 < version < (readable := oldest(kind, NEWEST[kind])):
        return f"version {readable} is the oldest readable here"
    if kind == "plan.decided" and isinstance(decider, int) and 0 < decider < OLDEST_DECIDER:
        return f"its plan is of decider {decider}, and decider {OLDEST_DECIDER} is the oldest readable here"
    return ""


def _unknown_paths(err: Exception) -> list[tuple[int | str, ...]]:
    # The first part of the place is the type, by which the union was resolved.
    return [item["loc"][1:] for item in _complaints(err) if item["type"] == "extra_forbidden"]


def _complaints(err: Exception) -> list[Any]:
    if not isinstance(err, ValidationError):
        return []
    return list(err.errors(include_url=False, include_context=False, include_input=False))


def _sentence(err: Exception) -> str:
    """Return the parser's first complaint in one line."""
    complaints = _complaints(err)
    if not complaints:
        return str(err)
    place = ".".join(str(part) for part in complaints[0]["loc"][1:])
    more = f", and {len(complaints) - 1} more" if len(complaints) > 1 else ""
    return f"{place}: {complaints[0]['msg']}{more}" if place else f"{complaints[0]['msg']}{more}"
