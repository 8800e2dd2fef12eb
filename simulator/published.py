"""Numbers of the Unicron paper's evaluation, each with how it is known (``data/unicron_evaluation.csv``)."""

from __future__ import annotations

import csv
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Published(NamedTuple):
    """A row of the table. ``known``: ``read`` in a summary or table, or ``recalled``, which is no parameter to fit."""

    item: str
    key: str
    value: str
    unit: str
    known: str


@cache
def rows() -> tuple[Published, ...]:
    """Return all rows, in the order of the file."""
    text = files("simulator").joinpath("data/unicron_evaluation.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(Published(*row) for row in list(csv.reader(lines))[1:])


def row(item: str, key: str) -> Published:
    """Return one row.

    Raises:
        KeyError: there is none.
    """
    for each in rows():
        if (each.item, each.key) == (item, key):
            return each
    raise KeyError(f"{item}, {key}")


def manual_recovery_min() -> dict[str, float]:
    """Return part -> minutes of a manual recovery (figure 2): time-out, queue, environment, recompute."""
    found = row("manual recovery (Fig. 2)", "total")
    return {name: float(minutes) for name, minutes in re.findall(r"([a-z-]+) (\d+)", found.unit.partition(":")[2])}
