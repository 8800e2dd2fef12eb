"""``unicron plan list`` and ``show``; ``solve`` and ``throughput`` are in modules of their own."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from cli.ids import id_path
from cli.options import Format, Output, PlanId, Server, connected
from cli.output import clock, print_fields, print_table, printed_json, seconds_between
from cli.planning.plan_throughput import throughput

app = typer.Typer(help="Look at plans, or make one.", no_args_is_help=True, add_completion=False)


class _PlainHelp(typer.core.TyperCommand):
    """Its help is plain text: rich's frames would cut the long names of its options at 80 characters."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "rich_markup_mode": None})


if TYPE_CHECKING:
    from shared.planning.standalone import StandaloneAnswer


def solve(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM.json", help="The problem; - reads standard input.")],
    output: Output = Format.TEXT,
) -> None:
    """Find the best worker counts for the tasks of a problem, and prove that they are."""
    from cli.progress import progress_bar
    from shared.planning.standalone import parse_problem, solve_standalone

    asked = parse_problem(_read(problem))
    with progress_bar("the plan is solved"):
        answer = solve_standalone(asked)
    if not printed_json(answer.model_dump(), output):
        _print(answer)


def _read(path: Path) -> bytes:
    """Return the contents of a file; its size is checked before it is read.

    Raises:
        NotFound: there is no such file.
        InvalidInput: it cannot be read, or is too large.
    """
    from shared.errors import InvalidInput, NotFound
    from shared.planning.standalone import MAX_PROBLEM_BYTES, check_size

    try:
        with open("/dev/stdin" if str(path) == "-" else path, "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                check_size(status.st_size)
            text = file.read(MAX_PROBLEM_BYTES + 1)
    except FileNotFoundError as err:
        raise NotFound(f"there is no file {path}") from err
    except (OSError, ValueError) as err:
        raise InvalidInput(f"cannot read {path}: {err}") from err
    check_size(len(text))
    return text


def _print(answer: StandaloneAnswer) -> None:
    rows = [(t.name, t.workers, t.waf_flop_per_s, t.reward, t.penalty, t.objective, t.reason) for t in answer.terms]
    print_table(("TASK", "WORKERS", "WAF FLOP/S", "REWARD", "PENALTY", "G FLOP", "REASON"), rows)
    print()
    print_fields(
        [
            ("objective_flop", answer.objective),
            ("bound_flop", answer.bound),
            ("price_flop_per_worker", answer.price),
            ("solve_s", answer.solve_s),
        ]
    )


app.command("solve")(solve)
app.command("throughput", cls=_PlainHelp)(throughput)


@app.command("list")
def list_plans(
    task: Annotated[str | None, typer.Option(help="Only those that concern this task.")] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """List plans, the oldest first."""
    with connected(server) as client:
        page = client.pages("/v1/plans", {"task": task})
    if printed_json(page, output):
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
    with connected(server) as client:
        shown = client.get(id_path(client, "plan", plan))
    if printed_json(shown, output):
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
