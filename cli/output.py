"""Output of the verbs: JSON, tables and fields."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cli.options import Format
from shared.text import prefix_of

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS = 10_000
"""Width where the output is no terminal: enough that no cell is ever cut."""


FAILURE_PARTS = ("detection_worker_s", "transition_worker_s", "recompute_worker_s", "sub_healthy_worker_s")
"""They add up to an incident's worker-seconds; a lost worker's are part of the sub-healthy ones."""

COST_PARTS = (*FAILURE_PARTS, "lost_worker_s", "lost_flop")
"""What an incident costs besides money, in the order in which it is shown."""

_GAP = 2
"""Spaces between two columns."""

SHORT_ID = 8
"""Characters of an id where space is short: of a UUID enough that two of a log hardly ever begin alike."""

_NOTHING = "-"
"""Cell of a value that says nothing."""

_LEAST_TEXT = 16
"""Characters to which a column of text may shrink: its cells then take several lines, and words stay mostly whole."""


def console(*, wide: bool = False) -> Console:
    """Return the console of standard output: as wide as the terminal, or as ``UNICRON_COLUMNS`` says.

    Where the output is no terminal, or if ``wide``: as wide as its lines. ``COLUMNS`` does not count there: many shells
    export it, and what a script reads must not depend on a window.
    """
    from rich.console import Console

    if _unbounded(wide):
        return Console(width=_PIPE_COLUMNS, highlight=False, soft_wrap=True)
    given = os.environ.get("UNICRON_COLUMNS", "")
    return Console(width=int(given) if given.isdecimal() else None, highlight=False)


def _unbounded(wide: bool) -> bool:
    """Return whether lines are as long as what they have."""
    return wide or not (sys.stdout.isatty() or os.environ.get("UNICRON_COLUMNS", "").isdecimal())


def print_json(value: Any) -> None:
    """Print one JSON document, indented."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def printed_json(value: Any, output: Format) -> bool:
    """Print an answer as JSON if the user has asked for that; return whether it is printed."""
    if output is Format.JSON:
        print_json(value)
    return output is Format.JSON


def print_markdown(page: str) -> None:
    """Lay a page of Markdown out for the terminal."""
    from rich.markdown import Markdown

    console().print(Markdown(printable(page), hyperlinks=False))


def print_json_line(value: Any) -> None:
    """Print one JSON document on one line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    empty: str = "none",
    least: Sequence[str] = (),
    ids: Sequence[str] = (),
    wide: bool = False,
) -> None:
    """Print rows under headings; ``None`` shows as ``-``.

    Args:
        columns: the headings.
        rows: a cell for each heading.
        empty: printed in place of no rows.
        least: headings of columns that are left out, in this order, where the lines are too short for all. Columns
            without any value are left out before these, except the first one. Before a column is left out, the cells of
            the last one take several lines each, if they are text.
        ids: headings of columns of ids, which are cut to their beginnings before any column is left out: the beginning
            of an id is enough for other verbs (``cli/ids.py``).
        wide: print all columns, however long the lines are.
    """
    cells = [[text(cell) for cell in row] for row in rows]
    if not cells:
        print(empty)
        return
    width = _PIPE_COLUMNS if _unbounded(wide) else console().width
    empties = [column for i, column in enumerate(columns) if i and all(row[i] == _NOTHING for row in cells)]
    least = [*empties, *least]
    left_out = [] if wide else too_wide(columns, cells, least, width)
    if set(left_out) - set(empties):
        for i in (i for i, column in enumerate(columns) if column in ids):
            beginnings = distinct_beginnings([row[i] for row in cells])
            for row, beginning in zip(cells, beginnings, strict=True):
                row[i] = beginning
        left_out = too_wide(columns, cells, least, width)
    shown = [i for i, column in enumerate(columns) if column not in left_out]
    _print_columns([columns[i] for i in shown], [[row[i] for i in shown] for row in cells], width, wide=wide)
    if left_out:
        print(f"left out: {', '.join(left_out)} (-o wide has all)")


def _print_columns(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int, *, wide: bool) -> None:
    """Print columns below their headings; the last one takes several lines where a line is longer than ``width``."""
    sizes = [max(map(_columns_of, (column, *(row[i] for row in cells)))) for i, column in enumerate(columns)]
    if any("\n" in cell for row in cells for cell in row) or sum(sizes) + _GAP * (len(sizes) - 1) > width:
        _print_folded(columns, cells, wide=wide)
        return
    # Rich takes a millisecond for a row, which hundreds of rows do not need.
    heading, *lines = (
        "".join(cell + " " * (size + _GAP - _columns_of(cell)) for cell, size in zip(row, sizes, strict=True)).rstrip()
        for row in (columns, *cells)
    )
    if sys.stdout.isatty():
        from rich.text import Text

        console(wide=wide).print(Text(heading, style="bold"), soft_wrap=True)
    else:
        print(heading)
    print("\n".join(lines))


def _print_folded(columns: Sequence[str], cells: Sequence[Sequence[str]], *, wide: bool) -> None:
    """Print columns of which cells take several lines."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        # A column that is not the last never breaks: the half of a number, or of an id to be copied, is of no use.
        table.add_column(column, overflow="fold", no_wrap=i != len(columns) - 1)
    for row in cells:
        table.add_row(*map(Text, row))
    console(wide=wide).print(table)


def _columns_of(cell: str) -> int:
    """Return how many columns of a terminal a text of one line takes."""
    if cell.isascii():
        return len(cell)
    from rich.cells import cell_len

    return cell_len(cell)


def distinct_beginnings(ids: Sequence[str]) -> list[str]:
    """Return the beginnings of ids: ``SHORT_ID`` characters, or as many more as tell them from one another."""
    different = len(set(ids))
    longest = max(map(len, ids), default=0)
    size = next(n for n in range(SHORT_ID, max(longest, SHORT_ID) + 1) if len({one[:n] for one in ids}) == different)
    return [one[:size] for one in ids]


def too_wide(columns: Sequence[str], cells: Sequence[Sequence[str]], least: Sequence[str], width: int) -> list[str]:
    """Return the headings of the columns to leave out, so that a line of the others is at most ``width`` long.

    Args:
        columns: the headings.
        cells: of each row.
        least: headings in the order in which their columns are left out.
        width: characters of a line.
    """
    widths = {
        column: max(len(column), *(len(line) for row in cells for line in row[i].splitlines() or [""]))
        for i, column in enumerate(columns)
    }
    left_out: list[str] = []
    for column in (*dict.fromkeys(name for name in least if name in widths), None):
        shown = {name: size for name, size in widths.items() if name not in left_out}
        last = list(shown)[-1]
        shown[last] = min(shown[last], max(_LEAST_TEXT, len(last)))
        if sum(shown.values()) + _GAP * (len(shown) - 1) <= width or column is None:
            break
        left_out.append(column)
    return left_out


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
            return _NOTHING
        case float():
            return number(value)
        case list():
            return printable(", ".join(str(item) for item in value)) or _NOTHING
        case _:
            return printable(str(value))


def cropped(line: str, columns: int) -> str:
    """Return a line of at most so many columns of a terminal; one that was cut ends in an ellipsis."""
    from rich.cells import cell_len, set_cell_size

    return line if cell_len(line) <= columns else f"{set_cell_size(line, max(columns - 1, 0))}…"[:columns]


def printable(lines: str) -> str:
    """Return a text that may come from a training process, without what a terminal would obey."""
    if lines.isprintable():
        return lines
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in lines.expandtabs())


def number(value: float) -> str:
    """Return four digits of a number, from a million on with an SI prefix."""
    if abs(value) >= 1e6:
        scale, prefix = prefix_of(value)
        return f"{value / scale:.4g}{prefix}"
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def seconds_between(start: str | None, end: str | None) -> str | None:
    """Return the seconds between two times of the interface, as text."""
    if start is None or end is None:
        return None
    return f"{(datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds():.3f}"


def clock(at: str | None, *, milliseconds: bool = False) -> str | None:
    """Return a time of the interface as date and time of day, in UTC."""
    if at is None:
        return None
    found = datetime.fromisoformat(at)
    seconds = f"{found:%Y-%m-%d %H:%M:%S}"
    return f"{seconds}.{found.microsecond // 1000:03}" if milliseconds else seconds
