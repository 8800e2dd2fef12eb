"""``unicron status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from cli.options import Format, Output, Server
from cli.output import print_json, print_table, printable

if TYPE_CHECKING:
    from cli.client import Client

PATH = "/v1/status"

_LATELY = timedelta(days=1)
"""How long a failed task is named, unless somebody resumes or deletes it before."""

_NAMED = 4
"""Most incidents that are named, those that are stuck first: all is to be seen in ten lines."""

_LOOKED_AT = 100
"""Failed tasks that are looked at, the last submitted: where more have failed within a day, it is one cause."""

_GOING_ON = ("pending", "queued", "running", "transitioning", "degraded", "stopping")


def status(server: Server = None, output: Output = Format.TEXT) -> None:
    """Show at a glance whether anything needs somebody: control plane, nodes, tasks and open incidents.

    With -o wide also each part of the control plane; LAG: events of the log that the part has not handled. Exit status:
    0 if nothing needs somebody, 1 if a part does not work, an incident is stuck, or a task has failed within a day or
    waits for its operator.
    """
    from cli.client import Client

    with Client(server) as client:
        found = client.get(PATH)
        seen = _look(client)
    needs = needs_somebody(seen)
    if output is Format.JSON:
        print_json({**found, **seen, "needs_somebody": needs or not found["ready"]})
    else:
        for line in _lines(found, seen):
            print(printable(line))
    if output is Format.WIDE:
        rows = [
            (check["name"], "works" if check["ok"] else "does not work", check["lag"], check["detail"])
            for check in found["checks"]
        ]
        print()
        print_table(("PART", "STATE", "LAG", "DETAIL"), rows, wide=True)
    if needs or not found["ready"]:
        raise typer.Exit(1)


def _look(client: Client) -> dict[str, Any]:
    """Return open incidents, tasks by state, those that failed of late, and those that wait for their operator."""
    since = (datetime.now(UTC) - _LATELY).isoformat()
    tasks = client.pages("/v1/tasks", {"state": list(_GOING_ON)})["items"]
    failed = client.pages("/v1/tasks", {"state": "failed", "order": "newest"}, most=_LOOKED_AT)["items"]
    return {
        "open_incidents": client.pages("/v1/incidents", {"state": "open"})["items"],
        "tasks": dict(Counter(task["state"] for task in tasks)),
        "failed_tasks": [task["name"] for task in failed if (task["ended_at"] or "") >= since],
        "waiting_tasks": [task["name"] for task in tasks if task["wait"] is not None and task["wait"]["until"] is None],
    }


def needs_somebody(seen: dict[str, Any]) -> bool:
    """Return whether an incident is stuck, or a task has failed of late or waits. ``seen``: of ``_look``."""
    stuck = any(one["stuck_s"] is not None for one in seen["open_incidents"])
    return stuck or bool(seen["failed_tasks"] or seen["waiting_tasks"])


def _lines(found: dict[str, Any], seen: dict[str, Any]) -> Iterator[str]:
    yield summary(found)
    yield from (f"nodes: {check['detail']}" for check in found["checks"] if check["name"] == "nodes")
    states = ", ".join(f"{number} {state}" for state, number in seen["tasks"].items())
    yield f"tasks: {states or 'none goes on'}"
    if seen["failed_tasks"]:
        yield f"failed within a day: {', '.join(seen['failed_tasks'])} (unicron show TASK says why)"
    if seen["waiting_tasks"]:
        yield f"waiting for somebody: {', '.join(seen['waiting_tasks'])} (unicron show TASK says for what)"
    yield from _incident_lines(seen["open_incidents"])


def _incident_lines(open_: list[dict[str, Any]]) -> Iterator[str]:
    from cli.incidents.incident_show import kind_of, state_of

    stuck = sum(one["stuck_s"] is not None for one in open_)
    yield f"open incidents: {len(open_) or 'none'}{f', {stuck} stuck' if stuck else ''}"
    for one in sorted(open_, key=lambda one: -(one["stuck_s"] or 0.0))[:_NAMED]:
        where = one["worker"] or one["node"] or one["task"] or "the cluster"
        yield f"  {one['id']}  {kind_of(one)} of {where} ({', '.join(one['tasks'])}): {state_of(one)}"
    if len(open_) > _NAMED:
        yield "  more of them: unicron incidents --state open"


def summary(found: dict[str, Any]) -> str:
    """Return one line of how the parts of the control plane are, for the head of other outputs."""
    away = [f"{check['name']} ({check['detail']})" for check in found["checks"] if not check["ok"]]
    lags = {check["name"]: check["lag"] for check in found["checks"] if check["lag"] is not None}
    behind = [f"{name} {lag}" for name, lag in lags.items() if lag]
    state = f"does not work: {', '.join(away)}" if away else "all parts work"
    nobody = "none of the others is behind the log" if away else "none is behind the log"
    lag = f"behind the log by events: {', '.join(behind)}" if behind else nobody
    return f"control plane: {state}; {lag}"
