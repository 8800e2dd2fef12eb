"""``unicron events``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from cli.interrupt import end_at_once
from cli.options import Format, Output, Server, Since, connected, moment
from cli.output import console, cropped, print_json_line, printed_json

_HIDDEN = frozenset({"event_id", "schema_version", "type", "occurred_at"})
"""Fields that a line of text leaves out: its first columns have them, or only the JSON does."""

_NOTHING: tuple[object, ...] = (None, "", [], {})
"""Values that say nothing in a line of text."""

_FIRST = ("task", "node", "worker", "kind", "phase", "incident", "plan")
"""Fields that a short line has before the others: what the event is about."""

_MILLISECONDS = len("2026-03-01T12:00:00.000")
"""Characters of a time up to the milliseconds; all times are UTC."""

_LINE_CHARACTERS = 200
"""Length of an event's fields in a line of text, in characters; ``-o json`` prints all."""


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further events.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only events behind this position.")] = 0,
    last: Annotated[int | None, typer.Option(min=0, max=1_000_000, help="Only the last so many events.")] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="TYPE", help="Only events of this type, as plan.decided; may be repeated."),
    ] = None,
    since: Since = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most events to print, without --follow.")] = 1000,
    server: Server = None,
    output: Output = Format.TEXT,
) -> None:
    """Print the event log.

    With --follow -o json: one object a line.
    """
    with connected(server) as client:
        start = {"after": after, "last": last, "type": list(kinds or ()) or None, "since": moment(since)}
        if follow:
            _follow(client, start, output)
            return
        page = client.get("/v1/events", {**start, "limit": limit})
    if printed_json(page, output):
        return
    columns = console(wide=output is Format.WIDE).width
    for record in page["items"]:
        print(cropped(line(record), columns))
    if page["next_cursor"] is not None:
        same = "".join(f" --type {kind}" for kind in kinds or ())
        print(f"more: unicron events --after {page['next_cursor']}{same}", file=sys.stderr)


def _follow(client: Any, start: dict[str, Any], output: Format) -> None:
    """Print events as they are appended, until the server ends. ``start``: where to begin."""
    end_at_once()
    columns = console(wide=output is Format.WIDE).width
    with client.lines("/v1/events", {**start, "follow": True}, accept="text/event-stream") as lines:
        for record in records(lines):
            if output is Format.JSON:
                print_json_line(record)
            else:
                print(cropped(line(record), columns), flush=True)


def records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the records in a stream of server-sent events."""
    from unicron_client.answers import server_sent

    return server_sent(lines)


def line(record: dict[str, Any]) -> str:
    """Return a record as one line of text, whatever the width of the terminal."""
    fields = {name: value for name, value in record["event"].items() if name not in _HIDDEN and value not in _NOTHING}
    event = {name: fields.pop(name) for name in _FIRST if name in fields} | fields
    text = json.dumps(event, ensure_ascii=False)
    if len(text) > _LINE_CHARACTERS:
        text = text[: _LINE_CHARACTERS - 3] + "..."
    return f"{record['position']:>6}  {record['recorded_at'][:_MILLISECONDS]}Z  {record['type']:<20}  {text}"
