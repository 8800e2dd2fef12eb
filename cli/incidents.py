"""``unicron incidents``."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Format, Output, Server
from cli.output import clock, print_json, print_table, seconds_between


def incidents(
    task: Annotated[str | None, typer.Option(help="Only those that touched this task.")] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """List faults and what was done about them.

    DETECT: seconds from the fault to its detection. RESUME and RESTORE: seconds from the detection to the end of the
    interrupted step, and to planned strength.
    """
    from cli.client import Client

    with Client(server) as client:
        page = client.pages("/v1/incidents", {"task": task})
    if output is Format.JSON:
        print_json(page)
        return
    rows = [
        (
            clock(incident["occurred_at"]),
            incident["kind"],
            incident["severity"],
            incident["method"],
            incident["worker"] or incident["node"],
            incident["tasks"],
            seconds_between(incident["occurred_at"], incident["detected_at"]),
            seconds_between(incident["detected_at"], incident["resumed_at"]),
            seconds_between(incident["detected_at"], incident["restored_at"]),
            incident["steps_recomputed"],
            incident["state_source"],
            incident["response"],
        )
        for incident in page["items"]
    ]
    columns = ("AT (UTC)", "WHAT", "SEV", "FOUND BY", "WHERE", "TASKS")
    times = ("DETECT S", "RESUME S", "RESTORE S", "LOST STEPS", "STATE FROM", "RESPONSE")
    print_table((*columns, *times), rows, empty="no incidents")
