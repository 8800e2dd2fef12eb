"""Answers as models, and the paths and parameters of what they are of.

The models are imported when a method first returns one: the verbs of the command line that print JSON as it comes do
not wait for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from unicron_client.transport import Params

if TYPE_CHECKING:
    from pydantic import BaseModel

    M = TypeVar("M", bound=BaseModel)

Record = dict[str, Any]
"""A JSON object of the interface."""


def task_path(name: str) -> str:
    """Return where a task is."""
    return f"/v1/tasks/{quote(name, safe='')}"


def node_path(name: str) -> str:
    """Return where a node is."""
    return f"/v1/nodes/{quote(name, safe='')}"


def incident_path(incident: str) -> str:
    """Return where an incident is."""
    return f"/v1/incidents/{quote(incident, safe='')}"


def plan_path(plan: str) -> str:
    """Return where a plan is."""
    return f"/v1/plans/{quote(plan, safe='')}"


def order(newest_first: bool) -> Params:
    """Return the parameters of a list by what comes first."""
    return {"order": "newest"} if newest_first else {}


def moment(at: datetime | None) -> str | None:
    """Return a time as the interface takes it; one without a time zone is in UTC."""
    if at is None:
        return None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).isoformat()


def server_sent(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the records in a stream of server-sent events (each has one ``data`` line)."""
    for text in lines:
        if text.startswith("data:"):
            yield json.loads(text.removeprefix("data:"))


def typed(kind: type[M], value: object) -> M:
    """Return an answer as its model.

    Raises:
        Undecodable: it is none, as of a server of another version.
    """
    from pydantic import ValidationError

    from shared.errors import Undecodable

    try:
        return kind.model_validate(value)
    except ValidationError as err:
        places = ", ".join(".".join(map(str, item["loc"])) for item in err.errors(include_url=False)[:3])
        raise Undecodable(
            f"the server's answer is no {kind.__name__} that this version knows ({places}); "
            "client and server have to be of one version"
        ) from err


def restarts_whole(spec: Record) -> bool:
    """Return whether a fault ends the script of a task on all workers. ``spec``: as the interface has it."""
    return bool(spec.get("loop") == "restart")


def step_of(task: Record, of: str = " of ") -> str:
    """Return the step of a task, and of how many, where that is known: some scripts alone know when they end.

    Args:
        task: the task, as the interface has it.
        of: what stands between the two numbers.
    """
    if task["steps"] is None:
        return str(task["step"]) if task["step"] else "unknown"
    return f"{task['step']}{of}{task['steps']}"
