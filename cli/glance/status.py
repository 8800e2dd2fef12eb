"""``unicron status``."""

from __future__ import annotations

from typing import Any

import typer

from cli.options import Format, Output, Server
from cli.output import print_json, print_table, printable

PATH = "/v1/status"


def status(server: Server = None, output: Output = Format.TEXT) -> None:
    """Show how each part of the control plane is, how far behind the log it is, and the open incidents.

    LAG: events of the log that the part has not handled. Exit status: 0 if all parts work, 1 otherwise.
    """
    from cli.client import Client
    from cli.incidents.incident_show import kind_of, state_of

    with Client(server) as client:
        found = client.get(PATH)
        open_ = client.pages("/v1/incidents", {"state": "open"})["items"]
    if output is Format.JSON:
        print_json({**found, "open_incidents": open_})
    else:
        wide = output is Format.WIDE
        print(f"{printable(summary(found))}\n")
        rows = [
            (check["name"], "works" if check["ok"] else "does not work", check["lag"], check["detail"])
            for check in found["checks"]
        ]
        print_table(("PART", "STATE", "LAG", "DETAIL"), rows, wide=wide)
        print()
        incidents = [
            (one["id"], kind_of(one), one["severity"], one["worker"] or one["node"], one["tasks"], state_of(one))
            for one in open_
        ]
        columns = ("OPEN INCIDENT", "WHAT", "SEV", "WHERE", "TASKS", "STATE")
        print_table(columns, incidents, empty="no open incident", ids=("OPEN INCIDENT",), wide=wide)
    if not found["ready"]:
        raise typer.Exit(1)


def summary(found: dict[str, Any]) -> str:
    """Return one line of how the parts of the control plane are, for the head of other outputs."""
    away = [f"{check['name']} ({check['detail']})" for check in found["checks"] if not check["ok"]]
    lags = {check["name"]: check["lag"] for check in found["checks"] if check["lag"] is not None}
    behind = [f"{name} {lag}" for name, lag in lags.items() if lag]
    state = f"does not work: {', '.join(away)}" if away else "all parts work"
    nobody = "none of the others is behind the log" if away else "none is behind the log"
    lag = f"behind the log by events: {', '.join(behind)}" if behind else nobody
    return f"control plane: {state}; {lag}"
