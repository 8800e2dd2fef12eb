"""The event log on SQLite and PostgreSQL: appending, reading, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy

from shared.errors import Conflict, InvalidInput, Unavailable, VersionConflict
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskSubmitted
from shared.log.base import FIRST_HASH
from shared.log.log import EventLog
from shared.log.schema import Database
from tests.shared.samples import EPOCH, event_id, node_joined, plan, spec


@pytest.fixture
def log(log_url: str) -> Iterator[EventLog]:
    opened = EventLog(log_url)
    yield opened
    opened.close()


def test_an_empty_log(log: EventLog) -> None:
    assert log.read() == []
    assert log.last_position() == 0
    assert log.stream_version("cluster") == 0
    assert log.append([]) == []
    report = log.verify()
    assert (report.ok, report.events, report.problem, report.head) == (True, 0, "", FIRST_HASH)


def test_positions_versions_and_hashes(log: EventLog) -> None:
    first = log.append([node_joined(1, "n0"), node_joined(2, "n1")])
    second = log.append([node_joined(3, "n0")])
    records = first + second
    assert [record.position for record in records] == [1, 2, 3]
    assert [(record.stream, record.stream_version) for record in records] == [
        ("node/n0", 1),
        ("node/n1", 1),
        ("node/n0", 2),
    ]
    assert [record.previous_hash for record in records] == [FIRST_HASH, records[0].hash, records[1].hash]
    assert len({record.hash for record in records}) == 3
    assert log.read() == records
    assert log.last_position() == 3
    assert log.stream_version("node/n0") == 2
    assert log.verify().head == records[-1].hash


def test_read_pages(log: EventLog) -> None:
    log.append([node_joined(number) for number in range(1, 8)])
    assert [record.position for record in log.read(after=2, limit=3)] == [3, 4, 5]
    assert [record.position for record in log.read(after=5)] == [6, 7]
    assert log.read(after=7) == []


def test_every_field_comes_back(log: EventLog) -> None:
    submitted = TaskSubmitted(event_id=event_id(1), occurred_at=EPOCH, task="a", spec=spec("a"))
    decided = plan(2, {1: 0.1, 10: 1e308, 2: 5e-324})
    log.append([submitted, decided])
    assert [record.event for record in log.read()] == [submitted, decided]


def test_the_same_event_is_appended_once(log: EventLog) -> None:
    first = log.append([node_joined(1)])
    assert log.append([node_joined(1)]) == first
    mixed = log.append([node_joined(2), node_joined(1), node_joined(2)])
    assert [record.position for record in mixed] == [2, 1, 2]
    assert log.last_position() == 2


def test_an_id_with_other_content_is_refused(log: EventLog) -> None:
    log.append([node_joined(1)])
    other = node_joined(1).model_copy(update={"agent_pid": 77})
    with pytest.raises(Conflict, match="different content"):
        log.append([node_joined(2), other])
    assert log.last_position() == 1
    with pytest.raises(Conflict, match="different content"):
        log.append([node_joined(3), node_joined(3).model_copy(update={"agent_pid": 77})])
    assert log.last_position() == 1


def test_expected_versions(log: EventLog) -> None:
    log.append([node_joined(1, "n0")], expected={"node/n0": 0, "node/n1": 0})
    with pytest.raises(VersionConflict, match=r"stream node/n0 has version 1, expected 0"):
        log.append([node_joined(2, "n0")], expected={"node/n0": 0})
    with pytest.raises(VersionConflict):
        log.append([node_joined(2, "n0")], expected={"node/n0": 2})
    assert log.last_position() == 1
    log.append([node_joined(2, "n0")], expected={"node/n0": 1})
    # A repeat after a lost answer: the event is in the log, so another version of the stream is no conflict.
    assert log.append([node_joined(2, "n0")], expected={"node/n0": 1})[0].position == 2


def test_an_event_that_cannot_be_written_is_refused(log: EventLog) -> None:
    def error(**changes: object) -> ErrorDetected:
        values: dict[str, object] = {
            "event_id": event_id(1),
            "occurred_at": EPOCH,
            "incident": "i",
            "kind": ErrorKind.PROCESS_EXIT,
            "severity": Severity.SEV2,
            "method": next(iter(Method)),
            "detected_at": EPOCH,
        }
        return ErrorDetected.model_validate(values | changes)

    with pytest.raises(InvalidInput, match="time zone"):
        log.append([error(occurred_at=datetime(2024, 1, 1))])
    with pytest.raises(InvalidInput, match="NUL"):
        log.append([node_joined(1, "n\0")])
    assert log.last_position() == 0
    log.append([error(evidence={"output": "a\0b \x7f \u2028 \U0001f600"})])
    assert log.verify().ok


def test_recorded_at_never_falls(log_url: str) -> None:
    times = iter([EPOCH, EPOCH - timedelta(hours=1), EPOCH + timedelta(microseconds=1)])
    log = EventLog(log_url, clock=lambda: next(times))
    for number in (1, 2, 3):
        log.append([node_joined(number)])
    assert [record.recorded_at for record in log.read()] == [EPOCH, EPOCH, EPOCH + timedelta(microseconds=1)]
    assert all(record.recorded_at.tzinfo == UTC for record in log.read())
    assert log.verify().ok
    log.close()


@pytest.mark.parametrize("statement", ["UPDATE log SET data = '{}'", "DELETE FROM log WHERE position = 2"])
def test_changes_are_refused_by_the_database(log: EventLog, log_url: str, statement: str) -> None:
    log.append([node_joined(1), node_joined(2)])
    engine = sqlalchemy.create_engine(log_url)
    with pytest.raises(sqlalchemy.exc.DatabaseError, match="append-only"), engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()
    assert log.verify().events == 2


def test_a_log_has_its_guards_and_a_head(log: EventLog) -> None:
    assert log.lacking_guards() == []
    assert (log.head(), log.doubled_ids()) == (None, [])
    records = log.append([node_joined(1), node_joined(2)])
    assert log.head() == (2, records[1].hash, records[1].recorded_at.isoformat(timespec="microseconds"))
    assert log.doubled_ids() == []


def test_a_trigger_that_postgresql_lacks_is_named(postgres_url: str) -> None:
    log = EventLog(postgres_url)
    engine = sqlalchemy.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER log_no_truncate ON log")
        connection.exec_driver_sql("ALTER TABLE log DISABLE TRIGGER log_no_change")
        connection.exec_driver_sql("ALTER TABLE log DROP CONSTRAINT log_stream_version")
    engine.dispose()
    assert log.lacking_guards() == [
        "the trigger log_no_change",
        "the trigger log_no_truncate",
        "the constraint that stream and stream_version are unique",
    ]
    log.close()


def test_truncate_is_refused(postgres_url: str) -> None:
    log = EventLog(postgres_url)
    log.append([node_joined(1)])
    engine = sqlalchemy.create_engine(postgres_url)
    with pytest.raises(sqlalchemy.exc.DatabaseError, match="append-only"), engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE log")
    engine.dispose()
    assert log.last_position() == 1
    log.close()


_APPENDER = """
import sys
from shared.log.log import EventLog
from tests.shared.samples import node_joined
url, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
log = EventLog(url)  # may be the one that creates the table
print("ready", flush=True)
sys.stdin.readline()
for number in range(first, first + count):
    log.append([node_joined(number, "n0"), node_joined(10_000 + number, f"own-{first}")])
log.close()
"""


def test_two_processes_append_without_gaps(log_url: str) -> None:
    count = 40
    command = [sys.executable, "-c", _APPENDER, log_url]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [*command, first, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for first in ("1", "1001")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait(50) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    log = EventLog(log_url)
    records = log.read()
    assert [record.position for record in records] == list(range(1, 4 * count + 1))
    shared = [record for record in records if record.stream == "node/n0"]
    assert [record.stream_version for record in shared] == list(range(1, 2 * count + 1))
    report = log.verify()
    assert report.ok, report.problem
    log.close()


def test_threads_append_without_gaps(log: EventLog) -> None:
    def append(first: int) -> None:
        for number in range(first, first + 10):
            log.append([node_joined(number)])

    threads = [threading.Thread(target=append, args=(first,)) for first in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.position for record in log.read()] == list(range(1, 31))
    assert log.verify().ok


def test_a_retry_with_the_same_version_loses_the_race(log: EventLog, log_url: str) -> None:
    other = EventLog(log_url)
    other.append([node_joined(1, "n0")], expected={"node/n0": 0})
    with pytest.raises(VersionConflict) as caught:
        log.append([node_joined(2, "n0")], expected={"node/n0": 0})
    assert caught.value.extra == {"stream": "node/n0", "expected": 0, "actual": 1}
    other.close()


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://x/y", "sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_urls_that_are_no_log(url: str) -> None:
    with pytest.raises(InvalidInput):
        EventLog(url)


def test_a_connection_in_use_is_closed_when_it_is_returned(log_url: str) -> None:
    """As a thread has one whose caller was cancelled: the log is closed while the thread reads."""
    database = Database(log_url, read_only=False)
    with database.engine.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        database.close()
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    with pytest.raises(Exception, match="closed"):
        driver.cursor().execute("SELECT 1")


def test_a_database_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        EventLog(f"postgresql+psycopg://postgres@/x?host={tmp_path}")


def test_a_simulated_history_has_its_own_times(log: EventLog) -> None:
    first, second = EPOCH + timedelta(days=400), EPOCH + timedelta(days=401)
    log.append_history([(first, [node_joined(1, "n0"), node_joined(2, "n1")]), (second, [node_joined(3, "n0")])])
    log.append_history([])
    log.append_history([(first, [node_joined(4, "n2")])])  # a time never falls
    records = log.read()
    assert [record.recorded_at for record in records] == [first, first, second, second]
    assert [(record.stream, record.stream_version) for record in records] == [
        ("node/n0", 1),
        ("node/n1", 1),
        ("node/n0", 2),
        ("node/n2", 1),
    ]
    assert log.verify().ok


def test_a_simulated_history_with_a_known_id_and_other_content_is_refused(log: EventLog) -> None:
    log.append([node_joined(1, "n0")])
    with pytest.raises(Conflict):
        log.append_history([(EPOCH + timedelta(days=400), [node_joined(1, "n1")])])
    assert log.last_position() == 1
