"""``unicron slow-workers``."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Format, Output, Server, connected
from cli.output import clock, print_table, printed_json


def slow_workers(
    task: Annotated[str | None, typer.Option(help="Only those that were measured in this task.")] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """List workers that were slower than their peers, and those that still are.

    A task with a slow worker trains on, so it is no incident. SLOWER: own compute time over that of the peers, as
    measured last. `unicron postmortem ID` says what was decided about one, and what it cost.
    """
    with connected(server) as client:
        page = client.pages("/v1/slow-workers", {"task": task})
    if printed_json(page, output):
        return
    rows = [
        (
            found["id"],
            found["worker"],
            found["task"],
            f"{found['slowdown']:.3g}x",
            clock(found["found_at"]),
            clock(found["ended_at"]) if found["ended_at"] else "-",
            found["ended"] or "still slow",
            found["plans"],
        )
        for found in page["items"]
    ]
    columns = ("ID", "WORKER", "TASK", "SLOWER", "FOUND AT (UTC)", "OVER AT (UTC)", "STATE", "PLANS")
    least = ("PLANS", "STATE", "OVER AT (UTC)", "FOUND AT (UTC)", "SLOWER", "TASK")
    print_table(columns, rows, empty="no slow workers", least=least, ids=("ID",), wide=output is Format.WIDE)
