"""Why a record of the log cannot be read: it is damaged, or a newer version of the program has written it.

The log is stricter than the bus (``shared.messages``). A service that skips an event, or a field of one, would fold
another state than the service that wrote the event, decide otherwise, and relay the event without the field. So a
record that is not fully known is an error, which names its position, type and version.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import from_json

from shared.errors import Corrupt, NewerVersion, UnicronError
from shared.events import Event
from shared.messages import shown

_NEWEST: dict[str, int] = {
    event.model_fields["type"].default: event.model_fields["schema_version"].default
    for event in get_args(get_args(Event)[0])
}
"""Event type -> the newest schema version that this program knows."""


def unreadable(position: object, data: object, err: Exception) -> UnicronError:
    """Return the error of a record whose event cannot be parsed.

    Args:
        position: of the record.
        data: the event as it is stored.
        err: the parser's error.

    Returns:
        ``NewerVersion`` if the event has a type, a schema version or a field that this program does not know; else
        ``Corrupt``.
    """
    try:
        event = from_json(data) if isinstance(data, str) else None
    except ValueError:
        event = None
    if not isinstance(event, dict):
        return Corrupt(f"position {position}: not an event ({err})")
    kind, version = event.get("type"), event.get("schema_version")
    what = f"position {position}: event {shown(kind)}, schema version {shown(version)}"
    if unknown := _unknown(kind, version, err):
        return NewerVersion(
            f"{what}: {unknown}; a newer version of Unicron has written this log, and is needed to read it",
            position=position,
            type=kind if isinstance(kind, str) else None,
            schema_version=version if isinstance(version, int) else None,
        )
    return Corrupt(f"{what}: not an event ({err})")


def _unknown(kind: object, version: object, err: Exception) -> str:
    """Return what this program does not know of an event, in words; empty if it knows everything."""
    if isinstance(kind, str) and kind not in _NEWEST:
        return "its type is not known here"
    if isinstance(kind, str) and isinstance(version, int) and version > _NEWEST[kind]:
        return f"version {_NEWEST[kind]} is the newest known here"
    fields = _unknown_fields(err)
    return f"not known here: {', '.join(fields)}" if fields else ""


def _unknown_fields(err: Exception) -> list[str]:
    if not isinstance(err, ValidationError):
        return []
    found: list[Any] = err.errors(include_url=False, include_context=False, include_input=False)
    # The first part of the place is the type, by which the union was resolved.
    return [".".join(str(p) for p in item["loc"][1:]) for item in found if item["type"] == "extra_forbidden"]
