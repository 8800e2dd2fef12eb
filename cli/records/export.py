"""``unicron export``.

A file gets its table row by row, as CSV or as Parquet, and is renamed once it is whole.
"""

from __future__ import annotations

import contextlib
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from cli.options import Server, Since, connected, moment
from cli.progress import counted
from cli.records import export_tables
from cli.records.export_tables import Column, Record, Value
from shared.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow

    from unicron_client.resources import Client

_ROW_GROUP = 10_000
"""Rows of one row group of a Parquet file: some megabytes of memory, and few enough groups for quick reading."""


def write_csv(columns: Sequence[Column], rows: Iterable[Sequence[Value]], file: Path | None) -> int:
    """Write a table as CSV, with a line of names; return the number of rows. ``file``: None means standard output.

    Raises:
        InvalidInput: the file cannot be written.
    """
    if file is None:
        return _write_lines(columns, rows, sys.stdout)
    with _renamed_when_whole(file) as partial, partial.open("w", encoding="utf-8", newline="") as target:
        return _write_lines(columns, rows, target)


def _write_lines(columns: Sequence[Column], rows: Iterable[Sequence[Value]], target: TextIO) -> int:
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    number = 0
    for row in rows:
        writer.writerow([value.isoformat() if isinstance(value, datetime) else value for value in row])
        number += 1
    return number


def write_parquet(columns: Sequence[Column], rows: Iterable[Sequence[Value]], file: Path) -> int:
    """Write a table as Parquet; return the number of rows.

    Raises:
        InvalidInput: the file cannot be written, or pyarrow is not installed.
    """
    arrow, parquet = _pyarrow()
    schema = _schema(columns, arrow)
    number, remaining = 0, iter(rows)
    with _renamed_when_whole(file) as partial, parquet.ParquetWriter(partial, schema) as writer:
        while group := list(islice(remaining, _ROW_GROUP)):
            arrays = [
                arrow.array(values, kind) for values, kind in zip(zip(*group, strict=True), schema.types, strict=True)
            ]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            number += len(group)
    return number


def check_parquet() -> None:
    """Check that Parquet can be written.

    Raises:
        InvalidInput: pyarrow is not installed.
    """
    _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        problem = "needs pyarrow, which is not installed: pip install 'unicron-cluster[parquet]' provides it"
        raise InvalidInput.of("-o", "parquet", problem, f"-o: parquet {problem}") from None
    return pyarrow, pyarrow.parquet


def _schema(columns: Sequence[Column], arrow: Any) -> pyarrow.Schema:
    types = {
        "text": arrow.string(),
        "integer": arrow.int64(),
        "real": arrow.float64(),
        "time": arrow.timestamp("us", tz="UTC"),
    }
    return arrow.schema([arrow.field(column.name, types[column.type]) for column in columns])


@contextlib.contextmanager
def _renamed_when_whole(file: Path) -> Iterator[Path]:
    """Give a path to write to, which is renamed to ``file`` at the end, or deleted if the writing fails.

    Raises:
        InvalidInput: the file cannot be written.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        try:
            yield partial
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as err:
        text = f"{str(file)!r} cannot be written: {err.strerror or err}"
        raise InvalidInput.of("--output", str(file), text, f"--output: {text}") from err


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
    wanted = _format(file_format, file)
    if wanted is FileFormat.PARQUET:
        check_parquet()
        if file is None:
            raise InvalidInput.of("--output", None, "is needed for parquet, which is no text")
    with connected(server) as client, counted(f"export of {what.value}") as count:
        columns, objects = _table(client, what, moment(since))
        table = export_tables.rows(columns, count(objects))
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
    from unicron_client.transport import PAGE_ITEMS

    cursor: str | None = None
    while True:
        page = client.get(path, {"limit": PAGE_ITEMS, "since": since if cursor is None else None, "cursor": cursor})
        yield from page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return
