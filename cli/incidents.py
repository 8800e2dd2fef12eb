"""``unicron incidents``: a group of verbs that lists incidents where no verb is given.

``unicron incidents INCIDENT`` stands for ``unicron incidents show INCIDENT``.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer
import typer.core

from cli import incident_evidence
from cli.options import Format, Output, Server
from cli.output import clock, print_fields, print_json, print_table, seconds_between
from shared.errors import InvalidInput

_FAILURE_PARTS = ("detection_worker_s", "transition_worker_s", "recompute_worker_s", "sub_healthy_worker_s")
"""They add up to the incident's worker-seconds; a lost worker's are part of the sub-healthy ones."""

_COSTS = (*_FAILURE_PARTS, "lost_worker_s", "lost_flop", "failure_money")


class _Incidents(typer.core.TyperGroup):
    """Takes the id of an incident in the place of a verb: shows the incident."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that is to be run, and its arguments."""
        known = not args or args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else [_SHOW, *args])


_SHOW = "show"

app = typer.Typer(cls=_Incidents, add_completion=False, subcommand_metavar="[INCIDENT | COMMAND [ARGS]...]")


@app.callback(invoke_without_command=True)
def incidents(
    context: typer.Context,
    task: Annotated[str | None, typer.Option(help="Only those that touched this task.")] = None,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """List faults and what was done about them.

    With INCIDENT: all about one, its cost, its evidence, and models of what other answers would have cost.

    DETECT: seconds from the fault to its detection. RESUME and RESTORE: seconds from the detection to the end of the
    interrupted step, and to planned strength.
    """
    if context.invoked_subcommand is not None:
        if task is not None:
            raise InvalidInput("--task: not with an INCIDENT")
        context.default_map = {context.invoked_subcommand: {"server": server, "output": output}}
        return
    from cli.client import Client

    with Client(server) as client:
        page = client.pages("/v1/incidents", {"task": task})
    if output is Format.JSON:
        print_json(page)
        return
    rows = [
        (
            found["id"],
            clock(found["occurred_at"]),
            found["kind"],
            found["severity"],
            found["method"],
            found["worker"] or found["node"],
            found["tasks"],
            seconds_between(found["occurred_at"], found["detected_at"]),
            seconds_between(found["detected_at"], found["resumed_at"]),
            seconds_between(found["detected_at"], found["restored_at"]),
            found["steps_recomputed"],
            found["state_source"],
            found["response"],
        )
        for found in page["items"]
    ]
    columns = ("INCIDENT", "AT (UTC)", "WHAT", "SEV", "FOUND BY", "WHERE", "TASKS")
    times = ("DETECT S", "RESUME S", "RESTORE S", "LOST STEPS", "STATE FROM", "RESPONSE")
    # The id is what other verbs ask for; the rest is on the incident's own page, too.
    least = ("STATE FROM", "LOST STEPS", "FOUND BY", "TASKS", "RESUME S", "RESTORE S", "RESPONSE", "DETECT S", "WHERE")
    print_table((*columns, *times), rows, empty="no incidents", least=least, wide=output is Format.WIDE)


@app.command(_SHOW)
def show_incident(
    incident: Annotated[str, typer.Argument(metavar="INCIDENT", help="The incident's id.")],
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Show an incident: its cost, its evidence, and models of what other answers would have cost."""
    from cli.client import Client

    with Client(server) as client:
        shown = client.get(f"/v1/incidents/{quote(incident, safe='')}")
    if output is Format.JSON:
        print_json(shown)
    else:
        _print_one(shown)


_INCIDENT = Annotated[str, typer.Argument(metavar="INCIDENT", help="The incident's id.")]


@app.command("acknowledge")
def acknowledge_incident(incident: _INCIDENT, server: Server = None, output: Output = Format.TEXT) -> None:
    """Say that somebody takes care of an incident."""
    from cli.client import Client

    with Client(server) as client:
        shown = client.post(f"/v1/incidents/{quote(incident, safe='')}/acknowledge")
    if output is Format.JSON:
        print_json(shown)
    else:
        print(_acknowledged(shown))


@app.command("note")
def note_incident(
    incident: _INCIDENT,
    words: Annotated[str, typer.Argument(metavar="TEXT", help="The note, for everybody who looks at the incident.")],
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Add a note to an incident."""
    from cli.client import Client

    with Client(server) as client:
        shown = client.post(f"/v1/incidents/{quote(incident, safe='')}/notes", {"text": words})
    if output is Format.JSON:
        print_json(shown)
    else:
        print(f"{shown['id']}: noted, {len(shown['notes'])} in all")


def _acknowledged(shown: dict[str, Any]) -> str:
    found = shown["acknowledged"]
    return f"acknowledged by {found['by']} at {clock(found['at'])}"


def _print_notes(shown: dict[str, Any]) -> None:
    """Print what users say about an incident."""
    if shown["acknowledged"]:
        print(f"\n{_acknowledged(shown)}")
    for note in shown["notes"]:
        print(f"\n{note['by']} at {clock(note['at'])}:\n{incident_evidence.printable(note['text'])}")


def _print_one(shown: dict[str, Any]) -> None:
    """Print an incident, its cost as measured, and apart from it what models say of other answers."""
    cost = shown["cost"]
    names = ("id", "kind", "severity", "method", "worker", "node", "task", "tasks", "rank", "step")
    times = ("occurred_at", "detected_at", "planned_at", "resumed_at", "restored_at")
    answer = ("response", "plans", "state_source", "steps_recomputed")
    print_fields(
        [
            *((name, shown[name]) for name in names),
            *((name, clock(shown[name])) for name in times),
            *((name, shown[name]) for name in answer),
            *((f"cost.{name}", cost[name]) for name in _COSTS),
            *incident_evidence.fields(shown["evidence"]),
        ]
    )
    for paragraph in incident_evidence.paragraphs(shown["evidence"]):
        print(f"\n{paragraph}")
    _print_notes(shown)
    _print_observations(shown)
    failure_s = sum(cost[name] for name in _FAILURE_PARTS)
    rows = [("as it was (from the log)", failure_s, cost["lost_flop"])]
    rows += [(f"{one['answer']} (model)", one["worker_s"], one["lost_flop"]) for one in shown["counterfactuals"]]
    print()
    print_table(("ANSWER", "WORKER-S", "LOST WEIGHTED FLOP"), rows)
    for one in shown["counterfactuals"]:
        print(f"\n{one['answer']} is a model, not a measurement. It assumes:")
        for assumption in one["assumptions"]:
            print(f"- {assumption}")
    if not shown["counterfactuals"]:
        print("\nno other answer: the log has too little for a model")


def _print_observations(shown: dict[str, Any]) -> None:
    """Print what ranks and methods saw of the incident, and which of it is the root cause."""
    if not shown["observations"]:
        return
    rows = [
        (
            clock(one["at"]),
            one["kind"],
            one["method"],
            one["worker"] or one["node"],
            one["rank"],
            one["error"],
            one["detail"],
        )
        for one in shown["observations"]
    ]
    print()
    print_table(("SEEN AT (UTC)", "WHAT", "SEEN BY", "WHERE", "RANK", "ERROR", "DETAIL"), rows)
    if shown["omitted"]:
        print(f"and {shown['omitted']} more")
    cause = shown["root_cause"]
    print(f"root cause: {cause['kind']} ({cause['error']}) of {cause['worker'] or cause['node'] or shown['task']}")
