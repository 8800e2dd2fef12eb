"""``unicron incidents``: a group of verbs that lists incidents where no verb is given.

``unicron incidents INCIDENT`` stands for ``unicron incidents show INCIDENT``.
"""

from __future__ import annotations

from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated, Any

import typer
import typer.core

from cli.completion import incident_ids
from cli.ids import id_path
from cli.incidents.incident_show import kind_of, show, state_of
from cli.options import Format, IncidentId, Output, Server, Since, connected, moment
from cli.output import clock, print_table, printable, printed_json, seconds_between
from shared.errors import InvalidInput


class _Incidents(typer.core.TyperGroup):
    """Takes the id of an incident in the place of a verb: shows the incident."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that is to be run, and its arguments."""
        known = not args or args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else [_SHOW, *args])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return what a shell proposes: verbs, and ids."""
        found = super().shell_complete(ctx, incomplete)
        ids = [] if incomplete.startswith("-") else incident_ids(ctx, incomplete)
        # The class of proposals is part of Typer or of click, by Typer's version; shells need these members of it.
        return [*found, *(SimpleNamespace(value=value, type="plain", help=text) for value, text in ids)]


class Phase(StrEnum):
    """How far an incident has come."""

    OPEN = "open"
    CLOSED = "closed"


_SHOW = "show"

_NEWEST = 20
"""How many are listed unless more are asked for: a screen."""

_WIDE = ("ACKNOWLEDGED BY", "NOTES")
"""Columns of ``-o wide`` alone."""

_COLUMNS = (
    "INCIDENT", "AT (UTC)", "WHAT", "SEV", "FOUND BY", "WHERE", "TASKS", "DETECT S", "RESUME S", "RESTORE S",
    "LOST STEPS", "STATE FROM", "RESPONSE", *_WIDE, "STATE",
)  # fmt: skip

app = typer.Typer(cls=_Incidents, add_completion=False, subcommand_metavar="[INCIDENT | COMMAND [ARGS]...]")
app.command(_SHOW)(show)


@app.callback(invoke_without_command=True)
def incidents(
    context: typer.Context,
    task: Annotated[str | None, typer.Option(help="Only those that touched this task.")] = None,
    state: Annotated[
        Phase | None, typer.Option(help="Only these; closed: nothing is left to do.", show_choices=True)
    ] = None,
    since: Since = None,
    last: Annotated[int | None, typer.Option(min=0, help="So many, in place of 20.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """List faults and what was done about them.

    The newest is the first. With INCIDENT: all about one, its cost, its evidence, and models of what other answers
    would have cost.

    DETECT: seconds from the fault to its detection. RESUME and RESTORE: seconds from the detection to the end of the
    interrupted step, and to planned strength; a fault from which a task did not recover has none. STATE stuck: it is
    open, and takes so much longer than is usual for its kind.
    """
    if context.invoked_subcommand is not None:
        given = {"--task": task, "--state": state, "--since": since, "--last": last, "--all": every or None}
        for option, value in given.items():
            if value is not None:
                raise InvalidInput(f"{option}: not with an INCIDENT")
        context.default_map = {context.invoked_subcommand: {"server": server, "output": output}}
        return
    if every and last is not None:
        raise InvalidInput("--all: does not go with --last")
    most = None if every else _NEWEST if last is None else last
    with connected(server) as client:
        wanted = {"task": task, "state": state.value if state else None, "since": moment(since), "order": "newest"}
        page = client.pages("/v1/incidents", wanted, most=most if most is None else most + 1)
    older = most is not None and len(page["items"]) > most
    page["items"] = page["items"][:most]
    if printed_json(page, output):
        return
    wide = output is Format.WIDE
    columns = [name for name in _COLUMNS if wide or name not in _WIDE]
    rows = [
        (
            found["id"],
            clock(found["occurred_at"]),
            kind_of(found),
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
            *((found["acknowledged"] and found["acknowledged"]["by"], len(found["notes"])) if wide else ()),
            state_of(found, briefly=True),
        )
        for found in page["items"]
    ]
    # The id is what other verbs ask for, and whether it is healed is what people do; the rest is on its own page, too.
    least = ("STATE FROM", "LOST STEPS", "FOUND BY", "TASKS", "RESPONSE", "DETECT S", "SEV", "WHERE", "AT (UTC)")
    print_table(columns, rows, empty="no incidents", least=least, ids=("INCIDENT",), wide=wide)
    if older and last is None:
        print(f"the newest {most} (--all has all)")


@app.command("acknowledge")
def acknowledge_incident(incident: IncidentId, server: Server = None, output: Output = Format.TEXT) -> None:
    """Say that somebody takes care of an incident, or of another cause of trouble, by the id that `status` has.

    The latter holds until the cause is no more.
    """
    with connected(server) as client:
        cause = any(one["key"] == incident for one in client.get("/v1/troubles")["items"])
        path = f"/v1/troubles/{incident}" if cause else id_path(client, "incident", incident)
        shown = client.post(f"{path}/acknowledge")
    if printed_json(shown, output):
        return
    by, at = (shown["by"], None) if cause else shown["acknowledged"].values()
    print(f"acknowledged by {printable(by)}{f' at {clock(at)}' if at else ''}")


@app.command("note")
def note_incident(
    incident: IncidentId,
    words: Annotated[str, typer.Argument(metavar="TEXT", help="The note, for everybody who looks at the incident.")],
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Add a note to an incident."""
    with connected(server) as client:
        shown = client.post(f"{id_path(client, 'incident', incident)}/notes", {"text": words})
    if not printed_json(shown, output):
        print(f"{shown['id']}: noted, {len(shown['notes'])} in all")
