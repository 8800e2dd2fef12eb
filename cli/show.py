"""``unicron show``."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from cli.options import Format, Output, Server, TaskName
from cli.output import clock, print_fields, print_json, print_table


def _failure(failure: dict[str, Any] | None) -> str | None:
    """Return the newest checkpoint that could not be written, in words."""
    if failure is None:
        return None
    return f"step {failure['step']}, {clock(failure['at'])}, {failure['worker']}: {failure['reason']}"


def show(task: TaskName, server: Server = None, output: Output = Format.TEXT) -> None:
    """Show a task."""
    from cli.client import Client
    from cli.notable import notable
    from cli.remaining_time import eta

    with Client(server) as client:
        shown = client.get(f"/v1/tasks/{quote(task, safe='')}")
    if output is Format.JSON:
        print_json(shown)
        return
    layout = shown["layout"] or {}
    names = ("name", "state", "reason", "weight", "workers", "generation", "loss", "step_s")
    print_fields(
        [
            *((name, shown[name]) for name in names),
            ("step", f"{shown['step']} of {shown['steps']}"),
            ("eta", eta(shown)),
            ("plan", shown["plan"]),
            ("layout", ", ".join(f"{name} {size}" for name, size in layout.items())),
            ("throughput_flop_per_s", shown["throughput_flop_per_s"]),
            ("waf_flop_per_s", shown["waf_flop_per_s"]),
            ("checkpoint", shown["checkpoint"]),
            ("saved_step", shown["saved_step"]),
            ("checkpoint_failure", _failure(shown["checkpoint_failure"])),
            ("stop_refused", shown["stop_refused"] and shown["stop_refused"]["reason"]),
            *(("notable", text) for text in notable(shown)),
            ("submitted_at", clock(shown["submitted_at"])),
            ("started_at", clock(shown["started_at"])),
            ("ended_at", clock(shown["ended_at"])),
            *((f"result.{name}", value) for name, value in (shown["result"] or {}).items()),
        ]
    )
    if shown["ranks"]:
        print()
        columns = ("rank", "worker", "node", "pid", "state")
        rows = ([rank[name] for name in columns] for rank in shown["ranks"])
        print_table([name.upper() for name in columns], rows)
    if shown["traceback"]:
        print(f"\n{shown['traceback']}")
