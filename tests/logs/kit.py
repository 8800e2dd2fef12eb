"""Golden logs as files: one row of the log's table a line, restored into an SQLite log for the test."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from services.planner.decide import DECIDER
from shared.log.base import FIRST_HASH
from shared.log.chain import row_hash
from shared.log.log import EventLog
from shared.log.schema import COLUMNS

FOLDER = Path(__file__).parent

GOLDEN = sorted(FOLDER.glob("*.jsonl"))

COURSES = [
    pytest.param(
        path, id=path.stem, marks=[] if path.stem in (f"demo-{DECIDER}", f"every-event-{DECIDER}") else pytest.mark.slow
    )
    for path in GOLDEN
]
"""The recorded logs, for tests that fold each of them many times. The gate has the newest of the main job and of every
event.
"""


def golden_log(course: str) -> Path:
    """Return the log of a course that was recorded with the present decider."""
    return FOLDER / f"{course}-{DECIDER}.jsonl"


Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a golden log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def restore(rows: Iterable[Row], path: Path) -> Path:
    """Write rows, all columns as they are, into a new SQLite log; return its path."""
    EventLog(f"sqlite:///{path}").close()
    places = ", ".join("?" for _ in COLUMNS)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(f"INSERT INTO log VALUES ({places})", [[row[name] for name in COLUMNS] for row in rows])
    return path


def forge(rows: Iterable[Row], change: Callable[[Row], None]) -> list[Row]:
    """Return the log with every event changed as a forger would: in place, the hash chain computed anew.

    Args:
        rows: the log.
        change: changes the fields of one event in place.
    """
    forged, previous_hash = [], FIRST_HASH
    for row in rows:
        event = json.loads(row["data"])
        change(event)
        data = json.dumps(event, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        occurred_at = datetime.fromisoformat(event["occurred_at"]).isoformat(timespec="microseconds")
        row = {**row, "data": data, "occurred_at": occurred_at, "previous_hash": previous_hash}
        row["hash"] = previous_hash = row_hash(row)
        forged.append(row)
    return forged
