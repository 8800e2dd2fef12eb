"""Upcasting: events of older schema versions, as JSON objects, brought to the present shape.

``shared.events`` applies ``upcast`` when it parses an event, so stored logs and messages of older versions keep
folding. Stored bytes and their hashes stay as they are.

To change the shape of an event type: raise the ``Literal`` of its ``schema_version``, have the union ``Event`` parse it
through ``upcast`` (as it does ``StateMoved``), and add the step from the previous version to ``STEPS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shared.codes import known_code

Step = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes an event of one schema version and returns it in the next one, ``schema_version`` aside."""


def _state_moved_1(data: dict[str, Any]) -> dict[str, Any]:
    """Version 2 has ``code``; in version 1 it is the beginning of the failure's text, ``<code>: <phase>: <text>``."""
    detail = data.get("detail", "")
    failed = data.get("phase") == "failed" and isinstance(detail, str)
    return {**data, "code": known_code(detail.partition(":")[0]) if failed else None}


def _task_submitted_1(data: dict[str, Any]) -> dict[str, Any]:
    """In version 2 a specification may say ``auto`` for ``checkpoint.memory_every``, the default; it was 1 before."""
    spec = data.get("spec")
    place = spec.get("checkpoint", {}) if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(place, dict):
        return data
    return {**data, "spec": {**spec, "checkpoint": {"memory_every": 1, **place}}}


def _cluster_configured_1(data: dict[str, Any]) -> dict[str, Any]:
    """Version 2 has no parameters of futures, which plans are no longer compared in."""
    gone = ("rollouts", "repair_prior_s", "spare_nodes_max")
    return {name: value for name, value in data.items() if name not in gone}


def _plan_decided_1(data: dict[str, Any]) -> dict[str, Any]:
    """Version 2 has no ``outlook``, the futures of a plan; decider 5 had its advice on checkpoints there."""
    rest = {name: value for name, value in data.items() if name != "outlook"}
    outlook = data.get("outlook")
    advice = outlook.get("checkpoint_every_s") if isinstance(outlook, dict) else None
    return {"checkpoint_every_s": advice, **rest} if advice else rest


STEPS: Mapping[tuple[str, int], Step] = {
    ("cluster.configured", 1): _cluster_configured_1,
    ("plan.decided", 1): _plan_decided_1,
    ("state.moved", 1): _state_moved_1,
    ("task.submitted", 1): _task_submitted_1,
}
"""The step that takes an event type from a schema version to the next."""


def upcast(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event in the newest schema version of its type.

    An event that names no type or no schema version is returned as it is: it has the present shape.
    """
    event = dict(data)
    while (step := _next_step(event)) is not None:
        event = {**step(event), "schema_version": event["schema_version"] + 1}
    return event


def _next_step(event: Mapping[str, Any]) -> Step | None:
    kind, version = event.get("type"), event.get("schema_version")
    return STEPS.get((kind, version)) if isinstance(kind, str) and isinstance(version, int) else None


def upcast_given(data: Any) -> Any:
    """Return what is given for an event, for a validator: only a mapping can be of an older schema version."""
    return upcast(data) if isinstance(data, dict) else data
