"""Output of the verbs: JSON, tables and fields."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS = 10_000
"""Width where the output is no terminal: enough that no cell is ever cut."""


def console() -> Console:
    """Return the console of standard output."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else _PIPE_COLUMNS, highlight=False, soft_wrap=not terminal)


def print_json(value: Any) -> None:
    """Print one JSON document, indented."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """Print one JSON document on one line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "none") -> None:
    """Print rows under headings; ``None`` shows as ``-``."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(text(cell)) for cell in row))
    if table.row_count:
        console().print(table)
    else:
        print(empty)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print names and values below one another."""
    rows = [(name, text(value)) for name, value in fields]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def text(value: object) -> str:
    """Return a value as a cell."""
    match value:
        case None | "":
            return "-"
        case float():
            return f"{value:.4g}"
        case list():
            return ", ".join(str(item) for item in value) or "-"
        case _:
            return str(value)


def seconds_between(start: str | None, end: str | None) -> str | None:
    """Return the seconds between two times of the interface, as text."""
    if start is None or end is None:
        return None
    return f"{(datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds():.3f}"


def clock(at: str | None) -> str | None:
    """Return a time of the interface as date and time of day, in UTC."""
    return None if at is None else datetime.fromisoformat(at).strftime("%Y-%m-%d %H:%M:%S")
