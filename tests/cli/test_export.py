"""``unicron export``: the tables' columns, types and files."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cli.records import export_tables
from cli.records.export import write_csv, write_parquet
from cli.records.export_tables import Column, Value
from shared.errors import InvalidInput
from tests.api.kit import Server
from tests.cli.conftest import call_unicron

HAS_PARQUET = importlib.util.find_spec("pyarrow") is not None

COLUMNS = (
    Column("name", "text", lambda one: one["name"]),
    Column("steps", "integer", lambda one: one["steps"]),
    Column("cost_worker_s", "real", lambda one: one["cost"]),
    Column("at", "time", lambda one: export_tables.time_of(one["at"])),
)
OBJECTS: list[dict[str, Any]] = [
    {
        "name": 'a,\n"b" \N{GREEK SMALL LETTER ALPHA}',
        "steps": 2**53 + 1,
        "cost": 0.1,
        "at": "2025-03-01T12:00:00.5+00:00",
    },
    {"name": "", "steps": None, "cost": None, "at": None},
]


async def exported(server: Server, *arguments: str) -> list[dict[str, str]]:
    outcome = await call_unicron("export", *arguments, server=server.url)
    assert (outcome.code, outcome.err) == (0, "")
    return list(csv.DictReader(io.StringIO(outcome.out)))


async def test_every_table_has_a_row_for_each_object(healed: Server) -> None:
    for what, path in (("events", "events"), ("incidents", "incidents"), ("tasks", "tasks"), ("plans", "plans")):
        items = (await healed.http.get(f"/v1/{path}", params={"limit": 1000})).json()["items"]
        rows = await exported(healed, what)
        identity = "name" if what == "tasks" else "position" if what == "events" else "id"
        assert [row[identity] for row in rows] == [str(item[identity]) for item in items]
    (incident,) = await exported(healed, "incidents")
    assert (incident["kind"], incident["worker"], incident["plans"]) == ("process-exit", "n1/1", "p1")
    assert float(incident["detection_worker_s"]) == 2.0
    assert datetime.fromisoformat(incident["detected_at"]) == datetime(2025, 3, 1, 12, 1, 40, 500_000, UTC)
    assert float(incident["model_plain_restart_lost_flop"]) > 0.0
    (task,) = await exported(healed, "tasks")
    assert (task["step"], task["data"], task["remaining_s"]) == ("95", "4", "5.0")
    events = await exported(healed, "events")
    assert json.loads(events[0]["event_json"])["type"] == events[0]["type"] == "cluster.configured"


async def test_costs_add_up_in_each_breakdown(healed: Server) -> None:
    rows = await exported(healed, "cost")
    (whole,) = (row for row in rows if row["by"] == "all")
    kinds = [name for name in whole if name.endswith("_worker_s") and name != "allocated_worker_s"]
    for by in ("task", "node", "hardware"):
        shares = [row for row in rows if row["by"] == by]
        for name in (*kinds, "allocated_worker_s"):
            assert sum(float(row[name]) for row in shares) == pytest.approx(float(whole[name]))
    assert {row["currency"] for row in rows} == {"EUR"}


async def test_since_leaves_out_what_was_before(healed: Server) -> None:
    assert len(await exported(healed, "plans", "--since", "2025-03-01T12:01:00")) == 1
    assert len(await exported(healed, "incidents", "--since", "2025-03-01T12:02:00")) == 0
    events = await exported(healed, "events", "--since", "2025-03-01T12:01:46")
    assert [event["type"] for event in events] == ["state.moved", "state.moved"]


def test_csv_keeps_texts_and_leaves_missing_values_empty(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    assert write_csv(COLUMNS, export_tables.rows(COLUMNS, OBJECTS), file) == 2
    with file.open(newline="") as opened:
        head, first, second = csv.reader(opened)
    assert head == ["name", "steps", "cost_worker_s", "at"]
    assert first == [OBJECTS[0]["name"], str(2**53 + 1), "0.1", "2025-03-01T12:00:00.500000+00:00"]
    assert second == ["", "", "", ""]


def test_a_file_that_could_not_be_written_whole_is_not_there(tmp_path: Path) -> None:
    def broken() -> Iterator[list[Value]]:
        yield ["a", 1, 1.0, None]
        raise RuntimeError("the server ended")

    with pytest.raises(RuntimeError):
        write_csv(COLUMNS, broken(), tmp_path / "table.csv")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInput, match="--output"):
        write_csv(COLUMNS, iter(()), tmp_path / "no" / "folder.csv")


@pytest.mark.skipif(not HAS_PARQUET, reason="pyarrow is not installed (extra `parquet`)")
def test_parquet_has_types_and_every_value(tmp_path: Path) -> None:
    parquet = importlib.import_module("pyarrow.parquet")
    file = tmp_path / "table.parquet"
    assert write_parquet(COLUMNS, export_tables.rows(COLUMNS, OBJECTS), file) == 2
    table = parquet.read_table(file)
    assert [str(kind) for kind in table.schema.types] == ["string", "int64", "double", "timestamp[us, tz=UTC]"]
    assert [list(row.values()) for row in table.to_pylist()] == list(export_tables.rows(COLUMNS, OBJECTS))
    assert write_parquet(COLUMNS, iter(()), file) == 0
    assert parquet.read_table(file).schema == table.schema


@pytest.mark.skipif(not HAS_PARQUET, reason="pyarrow is not installed (extra `parquet`)")
async def test_the_ending_of_a_file_says_the_format(healed: Server, tmp_path: Path) -> None:
    parquet = importlib.import_module("pyarrow.parquet")
    for what in ("events", "incidents", "tasks", "cost", "plans"):
        file = tmp_path / f"{what}.parquet"
        outcome = await call_unicron("export", what, "--output", str(file), server=healed.url)
        rows = parquet.read_table(file).num_rows
        assert (outcome.code, outcome.out, outcome.err) == (0, "", f"{file}: {rows} rows\n")
        assert rows == len(await exported(healed, what))
    outcome = await call_unicron("export", "tasks", "-o", "parquet", server=healed.url)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--output" in outcome.err


@pytest.mark.skipif(HAS_PARQUET, reason="pyarrow is installed")
async def test_parquet_without_pyarrow_names_the_extra() -> None:
    outcome = await call_unicron("export", "tasks", "-o", "parquet", "--output", "x", server="http://127.0.0.1:9")
    assert (outcome.code, outcome.out) == (2, "")
    assert "pip install 'unicron-cluster[parquet]'" in outcome.err
