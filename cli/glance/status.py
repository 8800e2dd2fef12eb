"""``unicron status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import typer

from cli.options import Format, Output, Server, connected
from cli.output import SHORT_ID, clock, print_table, printable, printed_json

PATH = "/v1/status"

_NAMED = 3
"""Most causes that are named, the gravest first: all is to be seen in ten lines."""

_GOING_ON = ("pending", "queued", "running", "transitioning", "degraded", "stopping")


def status(server: Server = None, output: Output = Format.TEXT) -> None:
    """Show in ten lines what is wrong, what it loses each hour and what to do; control plane, nodes and tasks.

    `unicron incidents acknowledge ID` says that you are on it.

    With -o wide all causes, and each part of the control plane; LAG: events of the log that the part has not handled.
    Exit status: 0 if nothing needs somebody, 1 if a part does not work, an incident is stuck, a node is isolated, lost
    or unreachable, or a task has failed within a day or waits for its operator.
    """
    with connected(server) as client:
        found = client.get("/v1/troubles")
        tasks = client.pages("/v1/tasks", {"state": list(_GOING_ON)})["items"]
    needed = any(one["needs_somebody"] for one in found["items"])
    states = dict(Counter(task["state"] for task in tasks))
    wide = output is Format.WIDE
    if not printed_json({**found, "tasks": states, "needs_somebody": needed}, output):
        for line in _lines(found, states, None if wide else _NAMED):
            print(printable(line))
    if wide:
        print()
        rows = [row for check in found["status"]["checks"] for row in _rows(check)]
        print_table(("PART", "STATE", "LAG", "DETAIL"), rows, wide=True)
    if needed:
        raise typer.Exit(1)


def _rows(check: dict[str, Any]) -> Iterator[tuple[str, str, int | None, str]]:
    """Yield a row for a part of the control plane, and one for each of its processes that stands by."""
    active = [f"{one['process']}, token {one['token']}" for one in check["instances"] if one["active"]]
    detail = "; ".join([*filter(None, [check["detail"]]), *active])
    yield check["name"], "works" if check["ok"] else "does not work", check["lag"], detail
    for one in check["instances"]:
        if not one["active"]:
            yield check["name"], "stands by", one["lag"], one["process"]


def _lines(found: dict[str, Any], states: dict[str, int], most: int | None) -> Iterator[str]:
    checks = found["status"]["checks"]
    # The control plane has the first line.
    control = [one for one in found["items"] if one["kind"] == "control-plane"]
    yield "; ".join([summary(found["status"]), *map(_who, control)])
    yield from (f"  to do: {' '.join(one['todo'])}" for one in control)
    yield from (f"nodes: {check['detail']}" for check in checks if check["name"] == "nodes")
    yield f"tasks: {', '.join(f'{number} {state}' for state, number in states.items()) or 'none goes on'}"
    causes = [one for one in found["items"] if one not in control]
    if not causes:
        yield "no other trouble" if found["items"] else "no trouble"
    most = most if most is None else most - len(control)
    for one in causes[:most]:
        since = f" since {_brief_clock(one['since'], found['as_of'])} UTC" if one["since"] else ""
        late = "" if one["late_s"] is None else f", {one['late_s']:.0f} s late"
        loses = one["money_per_hour"] or 0.0
        yield f"{one['what']} ({one['state']}{since}{late}; {loses:.4g} {found['currency']}/h; {_who(one)})"
        if one["todo"]:
            yield f"  to do: {one['todo'][0]}"
    more = found["more"] + len(causes[len(causes) if most is None else most :])
    if more:
        yield f"and {more} more: -o wide"


def _brief_clock(at: str, now: str) -> str:
    """Return a time, without its date where that is the present one."""
    shown = str(clock(at))
    return shown.removeprefix(f"{now[:10]} ")


def _who(cause: dict[str, Any]) -> str:
    """Return who takes care of a cause; where nobody does, by which id `incidents acknowledge` knows it."""
    if cause["acknowledged"]:
        return f"{cause['by']} is on it"
    return f"nobody is on it: {cause['incidents'][0][:SHORT_ID] if cause['incidents'] else cause['key']}"


def summary(found: dict[str, Any]) -> str:
    """Return one line of how the parts of the control plane are, for the head of other outputs."""
    away = [f"{check['name']} ({check['detail']})" for check in found["checks"] if not check["ok"]]
    lags = {check["name"]: check["lag"] for check in found["checks"] if check["lag"] is not None}
    behind = [f"{name} {lag}" for name, lag in lags.items() if lag]
    state = f"does not work: {', '.join(away)}" if away else "all parts work"
    nobody = "none of the others is behind the log" if away else "none is behind the log"
    lag = f"behind the log by events: {', '.join(behind)}" if behind else nobody
    return f"control plane: {state}; {lag}"
