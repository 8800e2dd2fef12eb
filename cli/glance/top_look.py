"""What ``unicron top`` asks the server for at one look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.glance.status import PATH

if TYPE_CHECKING:
    from unicron_client.resources import Client

Record = dict[str, Any]
"""A JSON object of the interface."""

GOING_ON = ("running", "transitioning", "degraded", "stopping", "queued", "pending")
"""States of tasks that have not ended, in the order in which they are listed."""

_ENDED = ("succeeded", "failed", "stopped")

_ENDED_SHOWN = 3
"""Tasks that ended last: one that was watched does not vanish from the screen."""

LATEST = 20
"""Open incidents, and plans, of one look: more than fit a screen beside the tasks."""

POINTS = 360
"""Into how many times the last hour of WAF is cut: ten seconds each."""


@dataclass(frozen=True)
class Look:
    """The answers of one look. ``incidents``: the open ones; they and ``plans``: the newest first.

    ``status``: how the parts of the control plane are.
    """

    server: str
    nodes: list[Record]
    tasks: list[Record]
    incidents: list[Record]
    plans: list[Record]
    waf: Record
    status: Record


def look(client: Client) -> Look:
    """Ask the server for all that is shown."""
    tasks = client.pages("/v1/tasks", {"state": list(GOING_ON)})["items"]
    ended = client.get("/v1/tasks", {"state": list(_ENDED), "order": "newest", "limit": _ENDED_SHOWN})["items"]
    newest: dict[str, str | int] = {"order": "newest", "limit": LATEST}
    return Look(
        server=client.server,
        nodes=client.pages("/v1/nodes")["items"],
        tasks=[*sorted(tasks, key=lambda task: GOING_ON.index(task["state"])), *ended],
        incidents=client.get("/v1/incidents", {**newest, "state": "open"})["items"],
        plans=client.get("/v1/plans", newest)["items"],
        waf=client.get("/v1/waf", {"points": POINTS}),
        status=client.get(PATH),
    )
