"""``unicron export``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import Server, Since, moment
from cli.progress import counted
from shared.errors import InvalidInput

if TYPE_CHECKING:
    from cli.client import Client
    from cli.records.export_tables import Column, Record


class Kind(StrEnum):
    """What is exported."""

    EVENTS = "events"
    INCIDENTS = "incidents"
    TASKS = "tasks"
    COST = "cost"
    PLANS = "plans"


class FileFormat(StrEnum):
    """How the table is written."""

    CSV = "csv"
    PARQUET = "parquet"


_TIME_OF = {Kind.INCIDENTS: "detected_at", Kind.TASKS: "submitted_at", Kind.PLANS: "decided_at"}
"""Which time of an object ``--since`` is about; events: when they were recorded; cost: the window's beginning."""


def export(
    what: Annotated[Kind, typer.Argument(metavar="WHAT", help="events, incidents, tasks, cost or plans.")],
    file_format: Annotated[
        FileFormat | None,
        typer.Option("-o", "--format", help="csv or parquet. Default: what the file's name ends with, else csv."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", dir_okay=False, help="Default: standard output (csv).")
    ] = None,
    since: Since = None,
    server: Server = None,
) -> None:
    """Write events, incidents, tasks, costs or plans as a flat table: CSV or Parquet.

    Names of columns have units. Times are UTC; money is in the cluster's currency; model_ marks what no log has
    measured. --since: events recorded, incidents detected, tasks submitted or plans decided from then on; cost: the
    time that is accounted for.
    """
    from cli.client import Client
    from cli.records.export_files import check_parquet, write_csv, write_parquet
    from cli.records.export_tables import rows

    wanted = _format(file_format, file)
    if wanted is FileFormat.PARQUET:
        check_parquet()
        if file is None:
            problem = "is needed for parquet, which is no text"
            raise InvalidInput(f"--output: {problem}", [{"field": "--output", "value": None, "problem": problem}])
    with Client(server) as client, counted(f"export of {what.value}") as count:
        columns, objects = _table(client, what, moment(since))
        table = rows(columns, count(objects))
        if wanted is FileFormat.PARQUET:
            assert file is not None
            number = write_parquet(columns, table, file)
        else:
            number = write_csv(columns, table, file)
    if file is not None:
        print(f"{file}: {number} rows", file=sys.stderr)


def _format(asked: FileFormat | None, file: Path | None) -> FileFormat:
    if asked is not None:
        return asked
    return FileFormat.PARQUET if file is not None and file.suffix == ".parquet" else FileFormat.CSV


def _table(client: Client, what: Kind, since: str | None) -> tuple[tuple[Column, ...], Iterator[Record]]:
    """Return the columns of a table, and the objects of its rows, which are asked for page by page."""
    from cli.records import export_tables

    if what is Kind.COST:
        costs = client.get("/v1/costs", {"from": since})
        return export_tables.cost_columns(costs), export_tables.cost_objects(costs)
    if what is Kind.EVENTS:
        return export_tables.EVENTS, _objects(client, "/v1/events", since=since)
    columns = {
        Kind.INCIDENTS: export_tables.INCIDENTS,
        Kind.TASKS: export_tables.TASKS,
        Kind.PLANS: export_tables.PLANS,
    }
    found = _objects(client, f"/v1/{what.value}")
    first = export_tables.time_of(since)
    if first is not None:
        found = (one for one in found if (at := export_tables.time_of(one[_TIME_OF[what]])) is not None and at >= first)
    return columns[what], found


def _objects(client: Client, path: str, *, since: str | None = None) -> Iterator[Record]:
    """Yield the items of a list, page by page: a log may have millions."""
    from cli.client import PAGE_ITEMS

    cursor: str | None = None
    while True:
        page = client.get(path, {"limit": PAGE_ITEMS, "since": since if cursor is None else None, "cursor": cursor})
        yield from page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return
