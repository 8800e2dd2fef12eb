"""The cut-over: a log that was cut and goes on reads, verifies and appends as the one that was not."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from shared.archive import cutover
from shared.archive.cutover import cut
from shared.archive.writing import archive
from shared.errors import Archived, Conflict, Corrupt, Unavailable, VersionConflict
from shared.events.union import Recorded
from shared.log.archived import verified_base
from shared.log.base import FIRST_HASH
from shared.log.log import EventLog
from shared.log.schema import Database
from shared.log.segments import read_rows, segments_in
from shared.model import Clock
from tests.examples import examples
from tests.shared.samples import node_joined

SEGMENTS = (5, 9)
"""Positions before which the segments of ``filled`` end."""

KILL_S = 60.0
"""Limit for a process that kills itself after a second or so."""


@pytest.fixture
def database_url(postgres_server: str) -> Iterator[str]:
    """URL of an empty PostgreSQL database, which nobody else has open."""
    name = f"cut_{uuid.uuid4().hex}"
    dsn = make_url(postgres_server).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    yield make_url(postgres_server).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name}".encode())


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty log, in both databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return str(request.getfixturevalue("database_url"))


def ticking(start: int = 0) -> Clock:
    """A clock that goes on by a second with each look."""
    seconds = iter(range(start, 10_000))
    return lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(seconds))


def append(url: str, *numbers: int) -> list[Recorded]:
    """Append events to the streams of three nodes in turn, at the time of the number."""
    with closing(EventLog(url, clock=ticking(min(numbers)))) as log:
        return [log.append([node_joined(number, f"n{number % 3}")])[0] for number in numbers]


def filled(url: str, folder: Path, events: int = 12) -> list[Recorded]:
    """Write a log and two segments of it; return its records."""
    records = append(url, *range(1, events + 1))
    with closing(EventLog(url, read_only=True)) as log:
        for before in SEGMENTS:
            archive(log, folder, before)
    return records


def read(url: str) -> list[Recorded]:
    with closing(EventLog(url, read_only=True)) as log:
        return list(log.read_all())


def test_a_log_that_was_cut_goes_on_as_if_it_had_not_been(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    records = filled(url, folder)
    assert cut(url, verified_base(folder, 7)) != ""
    assert read(url) == records
    with closing(EventLog(url, clock=ticking(5))) as log:
        assert log.base[:2] == (7, records[6].hash)
        assert [row.position for row in log.rows()] == [8, 9, 10, 11, 12]
        assert (log.last_position(), log.head()) == (12, (12, records[-1].hash, log.page(after=11)[0].recorded_at))
        assert [log.stream_version(f"node/n{number}") for number in (0, 1, 2, 3)] == [4, 4, 4, 0]
        assert [log.hash_at(position) for position in (1, 7, 8, 13)] == [
            *(records[place].hash for place in (0, 6, 7)),
            None,
        ]
        with pytest.raises(VersionConflict):
            log.append([node_joined(13, "n1")], expected={"node/n1": 1})
        (next_one,) = log.append([node_joined(13, "n1")], expected={"node/n1": 4})
        assert (next_one.position, next_one.stream_version) == (13, 5)
        assert next_one.previous_hash == records[-1].hash
        assert next_one.recorded_at == records[-1].recorded_at  # the clock has gone back, the log's time does not
        assert log.append([node_joined(8, "n2")]) == [records[7]]
        pages = [log.read(after=after, limit=2) for after in (5, 2, 6, 0, 1, 3)]
        assert [[record.position for record in page] for page in pages] == [
            [6, 7],
            [3, 4],
            [7, 8],
            [1, 2],
            [2, 3],
            [4, 5],
        ]
        report = log.verify()
        assert (report.ok, report.events, report.begins_after, report.head) == (True, 6, 7, next_one.hash)
        assert log.lacking_guards() == []
    assert read(url) == [*records, next_one]


def test_a_log_that_is_cut_to_its_end_has_its_head_and_goes_on(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    records = filled(url, folder, 8)
    with closing(EventLog(url, read_only=True)) as log:
        archive(log, folder, 9)
    cut(url, verified_base(folder, 8))
    with closing(EventLog(url)) as log:
        assert (log.last_position(), log.page(after=8)) == (8, [])
        head = log.head()
        assert head is not None
        assert head.hash == records[-1].hash
        (next_one,) = log.append([node_joined(9, "n0")])
        assert (next_one.previous_hash, next_one.stream_version) == (records[-1].hash, 3)


def test_a_log_can_be_cut_again_and_the_same_cut_twice_changes_nothing(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    records = filled(url, folder)
    first, second = verified_base(folder, 4), verified_base(folder, 8)
    names = [cut(url, first), cut(url, first), cut(url, second)]
    assert names[1] == ""
    assert len(set(names)) == 3
    with pytest.raises(Conflict, match="begins behind position 8 already"):
        cut(url, first)
    assert read(url) == records
    records += append(url, 13, 14)
    assert read(url) == records
    with closing(EventLog(url, read_only=True)) as log:
        assert archive(log, folder, 14) is not None
        assert (log.verify().ok, log.base.position) == (True, 8)
    rows = [row for path in segments_in(folder) for row in read_rows(path)]
    assert [row.hash for row in rows] == [record.hash for record in records[:13]]


@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_log_cut_anywhere_and_again_equals_the_uncut_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("log")
    plain, other, folder = f"sqlite:///{place / 'plain.db'}", f"sqlite:///{place / 'log.db'}", place / "segments"
    numbers = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=25, unique=True))
    behind = 0
    ends = data.draw(st.lists(st.integers(1, len(numbers)), max_size=3, unique=True).map(sorted))
    clocks = [ticking(), ticking()]
    for start, end in zip([0, *ends], [*ends, len(numbers)], strict=True):
        for address, clock in zip((plain, other), clocks, strict=True):
            with closing(EventLog(address, clock=clock)) as log:
                for number in numbers[start:end]:
                    log.append([node_joined(number, f"n{number % 4}")])
        with closing(EventLog(other, read_only=True)) as log:
            archive(log, folder, data.draw(st.integers(behind + 1, end + 1)))
            archived_up_to = max((row.position for path in segments_in(folder) for row in read_rows(path)), default=0)
        if archived_up_to > behind:
            behind = data.draw(st.integers(behind + 1, archived_up_to))
            cut(other, verified_base(folder, behind))
    with closing(EventLog(plain)) as one, closing(EventLog(other)) as two:
        assert list(two.read_all()) == list(one.read_all())
        after, limit = data.draw(st.integers(0, len(numbers))), data.draw(st.integers(1, 30))
        assert two.page(after=after, limit=limit) == one.page(after=after, limit=limit)
        assert two.page(after=max(after - 1, 0), limit=1) == one.page(after=max(after - 1, 0), limit=1)
        assert list(two.raw("node.joined", after=after)) == list(one.raw("node.joined", after=after))
        assert two.ids("node.joined", after=after) == one.ids("node.joined", after=after)
        day = datetime(2027, 1, 1, tzinfo=UTC).date()
        assert two.day_ends(after=after, before=day) == one.day_ends(after=after, before=day)
        assert (two.last_position(), two.head()) == (one.last_position(), one.head())
        for number in range(4):
            assert two.stream_version(f"node/n{number}") == one.stream_version(f"node/n{number}")
        report = two.verify()
        assert (report.ok, report.head, report.begins_after) == (True, one.verify().head, behind)
        assert report.events == len(numbers) - behind


def test_what_was_set_aside_is_the_whole_log_with_its_guards(tmp_path: Path) -> None:
    url, folder = f"sqlite:///{tmp_path / 'log.db'}", tmp_path / "segments"
    records = filled(url, folder)
    (tmp_path / "log.db").chmod(0o640)
    aside = cut(url, verified_base(folder, 7))
    assert Path(aside) == tmp_path / "log-000000000001-000000000012.db"
    with closing(EventLog(f"sqlite:///{aside}", read_only=True)) as log:
        assert (list(log.read_all()), log.verify().ok, log.lacking_guards()) == (records, True, [])
    assert (tmp_path / "log.db").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == [Path(aside).name, "log.db", "segments"]


def test_links_to_a_log_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    records = filled(f"sqlite:///{tmp_path / 'disk' / 'log.db'}", tmp_path / "segments")
    (tmp_path / "log.db").symlink_to(tmp_path / "disk" / "log.db")
    url = f"sqlite:///{tmp_path / 'log.db'}"
    assert Path(cut(url, verified_base(tmp_path / "segments", 7))).parent == tmp_path / "disk"
    assert (tmp_path / "log.db").is_symlink()
    assert read(url) == records


def test_the_table_that_was_set_aside_keeps_its_rows_and_triggers(database_url: str, tmp_path: Path) -> None:
    records = filled(database_url, tmp_path)
    assert cut(database_url, verified_base(tmp_path, 4)) == "log_until_4"
    append(database_url, 13)
    assert cut(database_url, verified_base(tmp_path, 7)) == "log_until_7"
    dsn = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert connection.execute("SELECT count(*) FROM log_until_4").fetchone() == (len(records),)
        assert connection.execute("SELECT count(*) FROM log_until_7").fetchone() == (9,)
        assert connection.execute("SELECT position FROM log_until_7_base").fetchone() == (4,)
        for statement in ("DELETE FROM log_until_4", "UPDATE log_base SET position = 1", "TRUNCATE log_base_streams"):
            with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
                connection.execute(statement.encode())


def test_an_open_log_is_not_cut(url: str, tmp_path: Path) -> None:
    records = filled(url, tmp_path / "segments")
    base = verified_base(tmp_path / "segments", 7)
    with closing(EventLog(url)) as log:
        log.last_position()
        with pytest.raises(Conflict, match="stop all services"):
            cut(url, base)
        log.append([node_joined(13, "n1")])
        assert log.base.position == 0
    assert read(url)[:-1] == records
    assert cut(url, base) != ""


def test_a_log_that_is_cut_while_it_is_opened_is_to_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = f"sqlite:///{tmp_path / 'log.db'}", tmp_path / "segments"
    records = filled(url, folder)
    check = Database._check_or_create

    def late(self: Database, read_only: bool) -> None:
        monkeypatch.undo()
        cut(url, verified_base(folder, 7))
        check(self, read_only)

    monkeypatch.setattr(Database, "_check_or_create", late)
    with pytest.raises(Unavailable, match="open it again"):
        EventLog(url)
    assert read(url) == records


def test_a_base_that_the_log_does_not_have_is_refused(url: str, tmp_path: Path) -> None:
    records = filled(url, tmp_path / "segments")
    base = verified_base(tmp_path / "segments", 7)
    for wrong in (base._replace(hash=FIRST_HASH), base._replace(position=30)):
        with pytest.raises(Corrupt):
            cut(url, wrong)
    with pytest.raises(Corrupt, match="version"):
        cut(url, base._replace(versions={**base.versions, "node/n1": 7}))
    with pytest.raises(Archived, match="segment with position 9"):
        verified_base(tmp_path / "segments", 9)
    with closing(EventLog(url)) as log:
        assert (list(log.read_all()), log.base.position, log.verify().ok) == (records, 0, True)


def test_gaps_are_refused_behind_a_base_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    filled(url, tmp_path / "segments", 8)
    cut(url, verified_base(tmp_path / "segments", 8))
    columns = "'e', 's', 1, 't', 1, '', '', '{}', '', ''"
    with closing(sqlite3.connect(tmp_path / "log.db")) as connection:
        for position in (1, 8, 10):
            with pytest.raises(sqlite3.IntegrityError, match="gaps refused"):
                connection.execute(f"INSERT INTO log VALUES ({position}, {columns})")
        for statement in (
            "UPDATE log_base SET position = 1",
            "DELETE FROM log_base_streams",
            "INSERT INTO log_base_streams VALUES ('node/n9', 3)",
        ):
            with pytest.raises(sqlite3.IntegrityError, match="does not change"):
                connection.execute(statement)


def test_without_segments_reading_says_what_to_do(url: str, tmp_path: Path) -> None:
    records = filled(url, tmp_path / "segments")
    cut(url, verified_base(tmp_path / "segments", 7))
    (tmp_path / "segments").rename(tmp_path / "elsewhere")
    with closing(EventLog(url)) as log:
        with pytest.raises(Archived, match="UNICRON_LOG_SEGMENTS") as raised:
            log.read(after=0)
        assert (raised.value.code, raised.value.exit_code) == ("archived", 3)
        assert log.read(after=7) == records[7:]
        assert log.verify().ok
    with closing(EventLog(url, segments=tmp_path / "elsewhere")) as log:
        assert list(log.read_all()) == records
    one, two = segments_in(tmp_path / "elsewhere")
    two.write_bytes(two.read_bytes() + b"x")
    with closing(EventLog(url, segments=tmp_path / "elsewhere")) as log:
        assert log.read(after=0, limit=4) == records[:4]
        with pytest.raises(Corrupt, match="was changed"):
            log.read(after=4)
    one.unlink()
    with closing(EventLog(url, segments=tmp_path / "elsewhere")) as log, pytest.raises(Archived, match="position 1 "):
        log.read(after=0)


KILLED = """
import os, signal, sys
from pathlib import Path
from shared.archive import cutover
from shared.log.archived import verified_base

step, when = sys.argv[3].split("/")
real = getattr(cutover, step)

def killed(*arguments, **named):
    if when == "after":
        real(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(cutover, step, killed)
cutover.cut(sys.argv[1], verified_base(Path(sys.argv[2]), 7))
"""


def kill_at(url: str, folder: Path, step: str) -> None:
    """Run a cut-over in a process that kills itself before or after a step."""
    command = [sys.executable, "-P", "-c", KILLED, url, str(folder), step]
    process = subprocess.run(command, timeout=KILL_S, check=False, env=os.environ)
    assert process.returncode == -signal.SIGKILL


FILE_STEPS = [
    pytest.param(f"{step}/{place}", marks=[pytest.mark.slow] if place == "before" else [])
    for step in ("build", "set_aside", "replace")
    for place in ("before", "after")
]
"""Before a step nearly all is as it is after the one before."""


@pytest.mark.slow
@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("step", FILE_STEPS)
def test_a_file_whose_cut_is_killed_is_the_old_or_the_new_log(
    step: str, appended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutover, "SOLE_S", 0.2)  # after which an open log is refused: not what is tested here
    url, folder = f"sqlite:///{tmp_path / 'log.db'}", tmp_path / "segments"
    records = filled(url, folder)
    kill_at(url, folder, step)
    done = step == "replace/after"
    if appended:  # services were started before the command was run again
        with closing(EventLog(url, clock=ticking(13))) as log:
            records += log.append([node_joined(13, "n1")])
            if not done:
                with pytest.raises(Conflict, match="stop all services"):
                    cut(url, verified_base(folder, 7))
    with closing(EventLog(url, read_only=True)) as log:
        assert (list(log.read_all()), log.verify().ok, log.base.position) == (records, True, 7 if done else 0)
    cut(url, verified_base(folder, 7))
    with closing(EventLog(url)) as log:
        assert (list(log.read_all()), log.base.position, log.verify().ok) == (records, 7, True)
        assert log.append([node_joined(20, "n1")])[0].position == len(records) + 1
    (aside,) = tmp_path.glob("log-*.db")
    with closing(EventLog(f"sqlite:///{aside}", read_only=True)) as log:
        assert list(log.read_all()) == (records[:12] if done else records)
    assert not (tmp_path / ".log.db.cut").exists()


@pytest.mark.parametrize(
    "step",
    ["_rename/after", *(pytest.param(s, marks=pytest.mark.slow) for s in ("_lock_table/after", "create_log/after"))],
)
def test_a_table_whose_cut_is_killed_is_the_old_log(step: str, database_url: str, tmp_path: Path) -> None:
    records = filled(database_url, tmp_path)
    kill_at(database_url, tmp_path, step)
    with closing(EventLog(database_url)) as log:
        assert (list(log.read_all()), log.base.position) == (records, 0)
    assert cut(database_url, verified_base(tmp_path, 7)) == "log_until_7"
    assert read(database_url) == records
