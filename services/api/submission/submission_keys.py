"""Idempotency keys of submissions that were used before: for what, and what differs."""

from __future__ import annotations

import json

from services.api.submission.resumption import as_logged, differences
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
    """Return the error of a key that was used for another specification; of ``env`` it has names and no values."""
    was, now = (spec.model_dump(mode="json", by_alias=True) for spec in (first, given))
    found = [
        f"{field} differs" if field.startswith("env.") else f"{field} was {_short(old)}, is {_short(new)}"
        for field, old, new in differences(was, now)
    ]
    return Conflict(
        f"idempotency key {key!r} was used for another specification of {given.name!r}: {'; '.join(found)}",
        key=key,
        differences=found,
    )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}..."
