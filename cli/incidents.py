"""``unicron incidents``: a group of verbs that lists incidents where no verb is given.

``unicron incidents INCIDENT`` stands for ``unicron incidents show INCIDENT``.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from cli.ids import id_path
from cli.incident_show import show
from cli.options import Format, IncidentId, Output, Server
from cli.output import clock, print_json, print_table, printable, seconds_between
from shared.errors import InvalidInput


class _Incidents(typer.core.TyperGroup):
    """Takes the id of an incident in the place of a verb: shows the incident."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that is to be run, and its arguments."""
        known = not args or args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else [_SHOW, *args])


_SHOW = "show"

app = typer.Typer(cls=_Incidents, add_completion=False, subcommand_metavar="[INCIDENT | COMMAND [ARGS]...]")
app.command(_SHOW)(show)


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
    print_table(
        (*columns, *times), rows, empty="no incidents", least=least, ids=("INCIDENT",), wide=output is Format.WIDE
    )


@app.command("acknowledge")
def acknowledge_incident(incident: IncidentId, server: Server = None, output: Output = Format.TEXT) -> None:
    """Say that somebody takes care of an incident."""
    from cli.client import Client

    with Client(server) as client:
        shown = client.post(f"{id_path(client, 'incident', incident)}/acknowledge")
    if output is Format.JSON:
        print_json(shown)
        return
    found = shown["acknowledged"]
    print(f"acknowledged by {printable(found['by'])} at {clock(found['at'])}")


@app.command("note")
def note_incident(
    incident: IncidentId,
    words: Annotated[str, typer.Argument(metavar="TEXT", help="The note, for everybody who looks at the incident.")],
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Add a note to an incident."""
    from cli.client import Client

    with Client(server) as client:
        shown = client.post(f"{id_path(client, 'incident', incident)}/notes", {"text": words})
    if output is Format.JSON:
        print_json(shown)
    else:
        print(f"{shown['id']}: noted, {len(shown['notes'])} in all")
