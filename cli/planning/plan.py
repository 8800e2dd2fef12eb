"""``unicron plan list`` and ``show``; ``solve`` and ``throughput`` are in modules of their own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.ids import id_path
from cli.options import Format, Output, PlanId, Server
from cli.output import clock, print_fields, print_json, print_table, seconds_between
from cli.planning.plan_solve import solve
from cli.planning.plan_throughput import throughput

# Help is plain text: rich's frames would cut the long names of `plan throughput` at 80 characters.
app = typer.Typer(help="Look at plans, or make one.", no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command("solve")(solve)
app.command("throughput")(throughput)


@app.command("list")
def list_plans(
    task: Annotated[str | None, typer.Option(help="Only those that concern this task.")] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """List plans, the oldest first."""
    from cli.client import Client

    with Client(server) as client:
        page = client.pages("/v1/plans", {"task": task})
    if output is Format.JSON:
        print_json(page)
        return
    rows = [
        (
            plan["id"],
            clock(plan["decided_at"]),
            plan["trigger"],
            plan["response"],
            plan["state"],
            plan["tasks"],
            plan["incident"],
        )
        for plan in page["items"]
    ]
    columns = ("PLAN", "AT (UTC)", "TRIGGER", "RESPONSE", "STATE", "TASKS", "INCIDENT")
    least = ("TASKS", "STATE", "INCIDENT", "RESPONSE")
    print_table(columns, rows, empty="no plans", least=least, ids=("PLAN", "INCIDENT"), wide=output is Format.WIDE)


@app.command("show")
def show_plan(
    plan: PlanId,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Show a plan: its trigger, the change of each task, the rejected alternatives, and how far it has come."""
    from cli.client import Client

    with Client(server) as client:
        shown = client.get(id_path(client, "plan", plan))
    if output is Format.JSON:
        print_json(shown)
        return
    names = ("id", "trigger", "cause", "incident", "response", "state", "supersedes", "superseded_by", "tasks")
    print_fields([*((name, shown[name]) for name in names), ("decided_at", clock(shown["decided_at"]))])
    print()
    print(shown["words"])
    if shown["milestones"]:
        print()
        print_table(("TASK", "PHASE", "AFTER S", "GENERATION", "STEP", "DURATIONS S", "DETAIL"), _milestones(shown))


def _milestones(plan: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            milestone["task"],
            milestone["phase"],
            seconds_between(plan["decided_at"], milestone["occurred_at"]),
            milestone["generation"],
            milestone["step"],
            ", ".join(f"{name} {value:.3f}" for name, value in milestone["durations_s"].items()),
            milestone["detail"],
        )
        for milestone in plan["milestones"]
    ]
