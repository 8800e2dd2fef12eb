"""The log as an SQLite file: copies, damage, and the detection of every changed cell."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shared.errors import Conflict, Corrupt, NotFound
from shared.events.union import Event
from shared.log import reading
from shared.log.chain import row_hash
from shared.log.log import EventLog
from shared.log.scan import Scan
from shared.log.schema import COLUMNS, StoredRow
from tests.examples import examples
from tests.shared.samples import events, node_joined, plan

ROOT = Path(__file__).parents[2]
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # for many small logs that are deleted


def open_log(path: Path, *, read_only: bool = False) -> EventLog:
    return EventLog(f"sqlite:///{path}", read_only=read_only)


@contextlib.contextmanager
def tampered(path: Path) -> Iterator[sqlite3.Connection]:
    """The file without the triggers that refuse changes."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        yield connection


@cache
def template() -> bytes:
    """The file of a closed log with six events of three streams."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "log.db"
        log = open_log(path)
        log.append([node_joined(1, "n0"), node_joined(2, "n1"), plan(3, {1: 0.5, 2: 1.0})])
        log.append([node_joined(4, "n0")])
        log.append([node_joined(5, "n0"), plan(6, {})])
        log.close()
        assert sorted(child.name for child in Path(folder).iterdir()) == ["log.db"]
        return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log file of its own for the test."""
    file = tmp_path / "log.db"
    file.write_bytes(template())
    return file


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(st.lists(st.lists(events, max_size=4), max_size=3))
def test_what_is_appended_is_read(batches: list[list[Event]]) -> None:
    unique: dict[str, Event] = {}
    for event in (event for batch in batches for event in batch):
        assume(unique.setdefault(event.event_id, event) == event)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        log = open_log(Path(folder) / "log.db")
        appended = [log.append(batch) for batch in batches]
        assert [[record.event for record in records] for records in appended] == batches
        records = log.read()
        assert [record.event.canonical() for record in records] == [event.canonical() for event in unique.values()]
        assert [record.position for record in records] == list(range(1, len(unique) + 1))
        for stream in {event.stream for event in unique.values()}:
            versions = [record.stream_version for record in records if record.stream == stream]
            assert versions == list(range(1, len(versions) + 1))
            assert log.stream_version(stream) == len(versions)
        # The same events in another order: nothing is added, and the same records are returned.
        again = log.append([event for batch in reversed(batches) for event in batch])
        assert again == [record for batch in reversed(appended) for record in batch]
        assert log.last_position() == len(unique)
        assert log.verify().ok
        assert log.verify().events == len(unique)
        log.close()


values = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20) | st.binary(max_size=20) | st.floats(allow_nan=False)


@settings(
    max_examples=examples(80), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much]
)
@given(position=st.integers(1, 6), column=st.sampled_from(COLUMNS), value=values | st.sampled_from(range(10)))
def test_any_changed_cell_is_found(position: int, column: str, value: object) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "log.db"
        path.write_bytes(template())
        cell = f"SELECT {column}, typeof({column}) FROM log ORDER BY position"
        with tampered(path) as connection:
            before = connection.execute(cell).fetchall()
            try:
                connection.execute(f"UPDATE log SET {column} = ? WHERE position = ?", (value, position))
            except sqlite3.IntegrityError:
                assume(False)
            connection.text_factory = bytes
            assume(connection.execute(cell.replace(column, f"CAST({column} AS BLOB)", 1)).fetchall() != before)
            connection.text_factory = str
            assume(connection.execute(cell).fetchall() != before)
        log = open_log(path, read_only=True)
        report = log.verify()
        log.close()
        assert not report.ok
        assert report.events < 6
        assert "position" in report.problem


@pytest.mark.parametrize(
    ("statement", "events_before", "problem"),
    [
        ("DELETE FROM log WHERE position = 3", 2, "position 3 is missing"),
        ("DELETE FROM log WHERE position = 1", 0, "position 1 is missing"),
        ("UPDATE log SET position = -1 WHERE position = 6", 0, "position 1 is missing"),
        ("UPDATE log SET data = CAST(x'ff' AS TEXT) WHERE position = 4", 3, "position 4: a column has"),
        ("UPDATE log SET occurred_at = '2024' WHERE position = 2", 1, "position 2: the row does not match its hash"),
        ("UPDATE log SET hash = upper(hash) WHERE position = 5", 4, "position 5: the row does not match its hash"),
    ],
)
def test_verify_says_where(path: Path, statement: str, events_before: int, problem: str) -> None:
    with tampered(path) as connection:
        connection.execute(statement)
    log = open_log(path)
    report = log.verify()
    log.close()
    assert not report.ok
    assert report.events == events_before
    assert problem in report.problem


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("stream_version", 7, "version 7 of stream cluster, expected 2"),
        ("type", "task.failed", "column type contradicts the event"),
        ("stream", "node/n7", "version 2 of stream node/n7, expected 1"),
        ("stream", "node/n1", "column stream contradicts the event"),
        ("recorded_at", "1999-01-01T00:00:00.000000+00:00", "recorded before"),
        ("data", "{}", "not an event"),
        ("position", 9, "position 6 is missing"),
    ],
)
def test_a_chain_computed_anew_does_not_hide_nonsense(path: Path, column: str, value: object, problem: str) -> None:
    with tampered(path) as connection:
        connection.execute(f"UPDATE log SET {column} = ? WHERE position = 6", (value,))
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM log ORDER BY position DESC").fetchone())
        connection.execute("UPDATE log SET hash = ? WHERE event_id = ?", (row_hash(row), row["event_id"]))
    log = open_log(path)
    report = log.verify()
    log.close()
    assert (report.ok, report.events) == (False, 5)
    assert problem in report.problem


def test_a_text_that_does_not_say_its_type_is_no_event(path: Path) -> None:
    with tampered(path) as connection:
        connection.execute("UPDATE log SET data = json_remove(data, '$.type')")
    log = open_log(path)
    assert [row.record for row in log.scan()] == [None] * 6
    with pytest.raises(Corrupt, match=r"position 1: .*not an event"):
        log.read()
    log.close()


@pytest.mark.parametrize("position", range(1, 7))
def test_a_text_that_is_not_unicode_is_in_its_row_alone(
    path: Path, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH", 2)
    with tampered(path) as connection:
        connection.execute("UPDATE log SET data = CAST(x'ff' AS TEXT) WHERE position = ?", (position,))
    log = open_log(path)
    assert [(row.position, row.data == "\udcff") for row in log.rows()] == [(at, at == position) for at in range(1, 7)]
    assert [row.position for row in log.scan() if row.problem] == [position]
    log.close()


def test_rows_before_an_error_of_the_database_are_scanned(path: Path) -> None:
    log = open_log(path)

    def stored() -> Iterator[StoredRow]:
        yield from itertools.islice(log.rows(), 3)
        raise Corrupt("damaged")

    rows = Scan().rows(stored())
    assert [next(rows).position for _ in range(3)] == [1, 2, 3]
    with pytest.raises(Corrupt, match="damaged"):
        next(rows)
    log.close()


def test_replace_is_refused(path: Path) -> None:
    columns = ", ".join(COLUMNS)
    moved = columns.replace("position", "7", 1)
    for selected in (columns, moved, moved.replace("event_id", "'new'", 1), columns.replace("position", "9", 1)):
        with contextlib.closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.Error, match="append-only"):
            connection.execute(f"INSERT OR REPLACE INTO log ({columns}) SELECT {selected} FROM log WHERE position = 2")
    log = open_log(path)
    assert log.verify().ok
    log.close()


def test_a_copy_in_a_read_only_folder_is_read_and_left_alone(path: Path) -> None:
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    path.chmod(stat.S_IRUSR)
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        log = open_log(path, read_only=True)
        assert [record.position for record in log.read()] == [1, 2, 3, 4, 5, 6]
        assert log.verify().ok
        with pytest.raises(Conflict, match="read-only"):
            log.append([node_joined(9)])
        log.checkpoint()
        log.close()
    finally:
        path.parent.chmod(stat.S_IRWXU)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert [child.name for child in path.parent.iterdir()] == ["log.db"]


def test_a_live_log_is_read_while_it_grows(tmp_path: Path) -> None:
    live = open_log(tmp_path / "log.db")
    live.append([node_joined(1)])
    reader = open_log(tmp_path / "log.db", read_only=True)
    assert reader.last_position() == 1
    live.append([node_joined(2)])
    assert [record.position for record in reader.read()] == [1, 2]
    reader.close()
    live.append([node_joined(3)])
    assert live.verify().events == 3
    live.close()


_KILLED = """
import os, signal, sys
from shared.log.log import EventLog
from tests.shared.samples import node_joined
log = EventLog(f"sqlite:///{sys.argv[1]}")
for number in range(1, 4):
    log.append([node_joined(number)])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "copied",
    [["log.db", "log.db-wal"], pytest.param(["log.db", "log.db-wal", "log.db-shm"], marks=pytest.mark.slow)],
)
def test_the_files_of_a_killed_process_are_complete(tmp_path: Path, copied: list[str]) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    copy.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", _KILLED, str(run / "log.db")], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    for name in copied:
        shutil.copy(run / name, copy / name)
    before = {name: (copy / name).read_bytes() for name in ("log.db", "log.db-wal")}
    log = open_log(copy / "log.db", read_only=True)
    assert (log.verify().ok, log.verify().events) == (True, 3)
    log.close()
    assert {name: (copy / name).read_bytes() for name in before} == before
    assert sorted(child.name for child in copy.iterdir()) == sorted(copied)
    restarted = open_log(run / "log.db")
    assert restarted.append([node_joined(4)])[0].position == 4
    restarted.close()


def test_after_a_checkpoint_the_main_file_alone_is_complete(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log.db")
    log.append([node_joined(1), node_joined(2)])
    log.checkpoint()
    shutil.copy(tmp_path / "log.db", tmp_path / "copy.db")
    log.close()
    copy = open_log(tmp_path / "copy.db", read_only=True)
    assert copy.verify().events == 2
    copy.close()


def test_the_file_is_in_wal_mode_and_has_the_application_id(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA application_id").fetchone() == (int.from_bytes(b"UNIC", "big"),)


@pytest.mark.parametrize("read_only", [False, True])
def test_foreign_files_are_refused(tmp_path: Path, read_only: bool) -> None:
    text = tmp_path / "text.db"
    text.write_text("not a database, but long enough to look at the header of one " * 20)
    with pytest.raises(Corrupt, match=r"text\.db: file is not a database"):
        open_log(text, read_only=read_only)
    other = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE users (id INTEGER)")
    with pytest.raises(Corrupt, match=r"not an event log: it has the tables users"):
        open_log(other, read_only=read_only)
    alike = tmp_path / "alike.db"
    with contextlib.closing(sqlite3.connect(alike)) as connection:
        connection.execute("CREATE TABLE log (position INTEGER, message TEXT)")
    with pytest.raises(Corrupt, match="columns position, message"):
        open_log(alike, read_only=read_only)


def test_a_damaged_file_is_reported(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = os.urandom(4096)  # the second page: the root of the table
    path.write_bytes(content)
    log = open_log(path, read_only=True)
    report = log.verify()
    assert not report.ok
    assert "malformed" in report.problem
    with pytest.raises(Corrupt):
        log.read()
    log.close()


def test_reading_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_log(tmp_path / "log.db", read_only=True)
    (tmp_path / "empty.db").touch()
    with pytest.raises(Corrupt, match="has no event log"):
        open_log(tmp_path / "empty.db", read_only=True)
    assert [child.name for child in tmp_path.iterdir()] == ["empty.db"]


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / ("a b%20#?ü" + "x" * 200) / ("y" * 200)
    log = open_log(folder / "log.db")
    log.append([node_joined(1)])
    log.close()
    assert (folder / "log.db").is_file()
