"""Idempotency keys of submissions that were used before: for what, and what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from services.api.submission.resumption import as_logged
from shared.errors import Conflict
from shared.events.union import TaskSubmitted
from shared.log.log import EventLog
from shared.tasks.specification import TaskSpec

_VALUE_CHARACTERS = 80
"""The length of a value in an error: a line of it."""


def check_unused(log: EventLog, key: str, event_id: str, spec: TaskSpec) -> None:
    """Check that a key has not submitted anything but the present task of a specification's name.

    Args:
        log: the event log.
        key: the idempotency key.
        event_id: of the submission, derived from the key; the present task was not submitted by it.
        spec: of the submission.

    Raises:
        Conflict: the key was used for another task, or for an earlier submission of this one.
    """
    kind = TaskSubmitted.model_fields["type"].default
    for position in [position for position, found in log.ids(kind) if found == event_id]:
        (earlier,) = log.read(after=position - 1, limit=1)
        first = earlier.event
        assert isinstance(first, TaskSubmitted)
        if first.task != spec.name:
            raise Conflict(f"idempotency key {key!r} was used for task {first.task!r}, not {spec.name!r}", key=key)
        if first.spec != as_logged(spec, first.spec):
            raise other_specification(key, first.spec, spec)
        raise Conflict(
            f"idempotency key {key!r} was used for an earlier submission of {spec.name!r}, which another has followed: "
            "take another key",
            key=key,
        )


def other_specification(key: str, first: TaskSpec, given: TaskSpec) -> Conflict:
    """Return the error of a key that was used for another specification of the task, with what differs."""
    found = [*differences(first.model_dump(mode="json", by_alias=True), given.model_dump(mode="json", by_alias=True))]
    return Conflict(
        f"idempotency key {key!r} was used for another specification of {given.name!r}: {'; '.join(found)}",
        key=key,
        differences=found,
    )


def differences(first: dict[str, Any], given: dict[str, Any], place: str = "") -> Iterator[str]:
    """Yield what differs between two specifications: the field, what it was, and what it is; of ``env`` the name."""
    for name in sorted({*first, *given}):
        was, now, field = first.get(name), given.get(name), f"{place}{name}"
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{field}.")
        elif place == "env.":
            yield f"{field} differs"
        else:
            yield f"{field} was {_short(was)}, is {_short(now)}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}..."
