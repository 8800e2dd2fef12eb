"""``unicron ps``."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import Format, Output, Server, connected
from cli.output import print_table, printable, printed_json
from unicron_client.answers import step_of


def ps(
    state: Annotated[list[str] | None, typer.Option(help="Only tasks in this state; may be repeated.")] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """List tasks.

    ETA: how long the task still trains if its steps take as long as of late. The last line says how the control plane
    is: while a part of it is away, faults are not healed.
    """
    from cli.glance.status import PATH, summary
    from cli.progress import eta
    from cli.tasks.notable import notable

    with connected(server) as client:
        page = client.pages("/v1/tasks", {"state": state or None})
        control_plane = client.get(PATH) if output is not Format.JSON else {}
    if printed_json(page, output):
        return
    rows = [
        (
            task["name"],
            task["state"],
            step_of(task, "/"),
            eta(task),
            task["workers"],
            task["weight"],
            task["loss"],
            task["waf_flop_per_s"] or None,
            "; ".join(filter(None, [task["reason"], *notable(task)])),
        )
        for task in page["items"]
    ]
    columns = ("NAME", "STATE", "STEP", "ETA", "WORKERS", "WEIGHT", "LOSS", "WAF FLOP/S", "REASON")
    least = ("WEIGHT", "LOSS", "WAF FLOP/S", "WORKERS")
    print_table(columns, rows, empty="no tasks", least=least, wide=output is Format.WIDE)
    print(f"\n{printable(summary(control_plane))}")
