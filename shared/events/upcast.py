"""Upcasting: events of older schema versions, as JSON objects, brought to the present shape.

``shared.events.union`` applies ``upcast`` to every event that it parses, so stored logs and messages of older versions
keep folding as far as ``STEPS`` leads from them to the present ones. Stored bytes and their hashes stay as they are. An
event from which no step leads on is refused (``shared.log.unreadable``).

To change the shape of an event type: raise the ``Literal`` of its ``schema_version``, and add the step from the
previous version to ``STEPS``. By one: for a new field with a default, whose step changes nothing. By two, with two
steps: for a change that the version before would misread (``shared.log.unreadable``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Step = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes an event of one schema version and returns it in the next one, ``schema_version`` aside."""


def has_new_fields(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event as it is: the next version of its type has further fields, with defaults."""
    return event


STEPS: dict[tuple[str, int], Step] = {("cluster.configured", 2): has_new_fields}
"""The step that takes an event type from a schema version to the next."""


def upcast(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the event in the newest schema version of its type to which steps lead.

    An event that names no type or no schema version is returned as it is: it has the present shape.
    """
    while (step := _next_step(event)) is not None:
        event = {**step(dict(event)), "schema_version": event["schema_version"] + 1}
    return event


def oldest(kind: str, newest: int) -> int:
    """Return the oldest schema version of an event type from which steps lead to the newest one."""
    while (kind, newest - 1) in STEPS:
        newest -= 1
    return newest


def _next_step(event: Mapping[str, Any]) -> Step | None:
    kind, version = event.get("type"), event.get("schema_version")
    return STEPS.get((kind, version)) if isinstance(kind, str) and isinstance(version, int) else None


def upcast_given(data: Any) -> Any:
    """Return the input of an event's validator in the newest shape: only a mapping can have an older schema version."""
    return upcast(data) if isinstance(data, dict) else data
