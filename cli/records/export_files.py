"""Files of ``unicron export``: a table row by row, as CSV or as Parquet, renamed once it is whole."""

from __future__ import annotations

import contextlib
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cli.records.export_tables import Column, Value
from shared.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow

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
        raise InvalidInput(
            f"-o: parquet {problem}", [{"field": "-o", "value": "parquet", "problem": problem}]
        ) from None
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
        raise InvalidInput(f"--output: {text}", [{"field": "--output", "value": str(file), "problem": text}]) from err
