"""Segments: they have the log's rows, synced and compared before they count; no log is changed."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.archive.writing import archive
from shared.errors import Conflict, Corrupt, InvalidInput, NotFound
from shared.log.base import FIRST_HASH
from shared.log.log import EventLog
from shared.log.schema import COLUMNS, StoredRow
from shared.log.segments import file_sha256, manifest_of, read_rows, segments_in
from tests.shared.samples import node_joined

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
EVENTS = 12


@pytest.fixture
def log(log_url: str) -> Iterator[EventLog]:
    """Twelve events, four a day."""
    times = iter(NOON + timedelta(days=number // 4, seconds=number) for number in range(EVENTS + 4))
    found = EventLog(log_url, clock=lambda: next(times))
    for number in range(EVENTS):
        found.append([node_joined(number)])
    yield found
    found.close()


def stored(folder: Path) -> list[StoredRow]:
    return [row for path in segments_in(folder) for row in read_rows(path)]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_segments_follow_one_another_and_have_the_rows_of_the_table(log: EventLog, tmp_path: Path, ending: str) -> None:
    rows, folder = list(log.rows()), tmp_path / "segments"
    first = archive(log, folder, 6, ending)
    assert first is not None
    assert (first.first_position, first.last_position, first.events) == (1, 5, 5)
    assert (first.previous_hash, first.head) == (FIRST_HASH, rows[4].hash)
    assert archive(log, folder, 6, ending) is None
    assert archive(log, folder, 3, ending) is None
    second = archive(log, folder, 100, ending)
    assert second is not None
    assert (second.first_position, second.last_position, second.previous_hash) == (6, EVENTS, first.head)
    assert stored(folder) == rows == list(log.rows())
    for manifest, path in zip((first, second), segments_in(folder), strict=True):
        assert manifest_of(path) == manifest
        assert (path.name, file_sha256(path), path.stat().st_size) == (
            manifest.file,
            manifest.sha256,
            manifest.size_bytes,
        )
        text = gzip.decompress(path.read_bytes()) if ending.endswith(".gz") else path.read_bytes()
        part = rows[manifest.first_position - 1 : manifest.last_position]
        assert [json.loads(line) for line in text.splitlines()] == [row._asdict() for row in part]
    assert sorted(os.listdir(folder)) == sorted(
        name for path in segments_in(folder) for name in (path.name, f"{path.name}.manifest.json")
    )


def test_a_day_stays_out_as_a_whole(log: EventLog, tmp_path: Path) -> None:
    found = archive(log, tmp_path / "segments", datetime(2026, 3, 2, tzinfo=UTC))
    assert found is not None
    assert (found.last_position, found.last_recorded_at[:10]) == (4, "2026-03-01")
    assert archive(log, tmp_path / "none", datetime(2026, 3, 1, tzinfo=UTC)) is None
    assert segments_in(tmp_path / "none") == []


def test_the_same_rows_make_the_same_file(log: EventLog, tmp_path: Path) -> None:
    found = [archive(log, tmp_path / name, 9) for name in ("one", "two")]
    assert found[0] == found[1] is not None
    (path,) = segments_in(tmp_path / "one")
    assert path.read_bytes()[4:8] == bytes(4)  # no time in the header of the compressed file (RFC 1952)


def damage(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(statement)
        connection.commit()


def written(path: Path, events: int = EVENTS) -> EventLog:
    log = EventLog(f"sqlite:///{path}", clock=lambda: NOON)
    for number in range(events):
        log.append([node_joined(number)])
    return log


def test_a_log_that_is_wrong_is_not_archived(tmp_path: Path) -> None:
    written(tmp_path / "log.db").close()
    damage(tmp_path / "log.db", "DELETE FROM log WHERE position = 4")
    with closing(EventLog(f"sqlite:///{tmp_path / 'log.db'}", read_only=True)) as log:
        with pytest.raises(Corrupt, match="position 4 is missing: 5 follows 3; nothing was archived"):
            archive(log, tmp_path / "segments", 9)
        assert os.listdir(tmp_path / "segments") == []
        assert archive(log, tmp_path / "segments", 3) is not None  # what is before the defect


def test_another_log_or_a_shorter_one_does_not_continue_a_folder(tmp_path: Path) -> None:
    with closing(written(tmp_path / "log.db")) as log:
        archive(log, tmp_path / "segments", 6)
    with closing(written(tmp_path / "other.db")) as other:
        other.append([node_joined(99)])
        damage(tmp_path / "other.db", "UPDATE log SET hash = 'x' WHERE position = 5")
        with pytest.raises(Corrupt):
            archive(other, tmp_path / "segments", 9)
    times = iter(NOON + timedelta(seconds=number) for number in range(9))
    with closing(EventLog(f"sqlite:///{tmp_path / 'third.db'}", clock=lambda: next(times))) as third:
        for number in range(9):
            third.append([node_joined(number)])
        with pytest.raises(Corrupt, match="position 5: the hash is not that of the segment log-000000000001-"):
            archive(third, tmp_path / "segments", 9)
    with closing(written(tmp_path / "short.db", 3)) as short:
        with pytest.raises(Corrupt, match="the log ends at position 3, the segments at 5"):
            archive(short, tmp_path / "segments", 9)


def test_what_reads_otherwise_than_it_was_written_does_not_count(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that loses what was written: nothing is left that could be taken for a segment."""
    synced = os.fsync

    def lose(descriptor: int) -> None:
        synced(descriptor)
        for path in (tmp_path / "segments").glob(".partial.jsonl"):
            path.write_bytes(path.read_bytes().replace(b"n0/0", b"n1/0"))

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(Corrupt, match="does not read as it was written"):
        archive(log, tmp_path / "segments", 9, ".jsonl")
    assert os.listdir(tmp_path / "segments") == []


def test_one_program_at_a_time_adds_to_a_folder(log: EventLog, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(Conflict, match="another program archives"):
        archive(log, folder, 9)
    os.close(descriptor)
    # What a program that was killed left behind is no segment, and is written over.
    (folder / ".partial.jsonl.gz").write_bytes(b"half")
    found = archive(log, folder, 9)
    assert found is not None
    assert [path.name for path in segments_in(folder)] == [found.file]
    with pytest.raises(InvalidInput, match=r"allowed: \.jsonl, \.jsonl\.gz"):
        archive(log, folder, 9, ".csv")


def test_a_segment_without_its_manifest_is_not_continued(log: EventLog, tmp_path: Path) -> None:
    """Who was killed between the two left the rows, all of them; the manifest decides."""
    archive(log, tmp_path / "segments", 5)
    (path,) = segments_in(tmp_path / "segments")
    beside = path.with_name(f"{path.name}.manifest.json")
    beside.write_text("{}")
    with pytest.raises(Corrupt, match="is not the manifest"):
        archive(log, tmp_path / "segments", 9)
    beside.unlink()
    with pytest.raises(NotFound, match="has no manifest"):
        archive(log, tmp_path / "segments", 9)


@settings(deadline=None, derandomize=True)
@given(cut=st.integers(0, 2000), noise=st.binary(max_size=8), ending=st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_a_damaged_file_ends_with_a_sentence(
    cut: int, noise: bytes, ending: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    row = dict.fromkeys(COLUMNS, "x") | {"position": 1, "stream_version": 1, "schema_version": 1}
    contents = "".join(json.dumps({**row, "position": at}) + "\n" for at in range(1, 9)).encode()
    data = gzip.compress(contents, mtime=0) if ending.endswith(".gz") else contents
    path = tmp_path_factory.getbasetemp() / f"damaged{ending}"
    path.write_bytes(data[:cut] + noise + data[cut + len(noise) :][: len(data) - cut - 1])
    with suppress(Corrupt):
        for found in read_rows(path):
            assert found._asdict().keys() == row.keys()


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        list(read_rows(tmp_path / "none.jsonl"))
