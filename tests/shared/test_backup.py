"""Backups: taken at any moment of a log in use, restored as a prefix of it in an empty database, and nowhere else."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.archive.backup import back_up
from shared.archive.cutover import cut
from shared.archive.restoration import restore
from shared.archive.writing import archive
from shared.errors import Archived, Conflict, Corrupt, InvalidInput, NotFound
from shared.log.archived import verified_base
from shared.log.log import EventLog
from shared.log.schema import StoredRow
from shared.log.segments import segments_in
from tests.condition import until_blocking
from tests.examples import examples
from tests.shared.samples import events, node_joined

EVENTS = 12


@pytest.fixture
def log(log_url: str) -> Iterator[EventLog]:
    with closing(EventLog(log_url)) as found:
        append(found, EVENTS)
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database: another one than that of ``log`` where that is PostgreSQL too."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'elsewhere' / 'log.db'}"
    return str(request.getfixturevalue("other_postgres_url"))


def append(log: EventLog, number: int) -> None:
    first = log.last_position()
    for each in range(first, first + number):
        log.append([node_joined(each)])


def rows_of(url: str) -> list[StoredRow]:
    with closing(EventLog(url, read_only=True)) as log:
        report = log.verify()
        assert (report.ok, log.lacking_guards()) == (True, [])
        return list(log.rows())


def test_a_backup_restored_is_the_log_with_its_guards_and_goes_on(
    log: EventLog, elsewhere: str, tmp_path: Path
) -> None:
    done = back_up(log, tmp_path / "backup")
    head = log.head()
    assert head is not None
    assert (done.position, done.head) == (EVENTS, head.hash)
    place = restore(tmp_path / "backup", elsewhere)
    assert (place.position, place.hash) == (EVENTS, head.hash)
    assert rows_of(elsewhere) == list(log.rows())
    with closing(EventLog(elsewhere)) as restored:
        append(restored, 3)
        assert back_up(restored, tmp_path / "backup").position == EVENTS + 3
        assert restored.verify().ok


def test_a_later_backup_adds_what_the_folder_lacks(log: EventLog, elsewhere: str, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    first = back_up(log, folder)
    again = back_up(log, folder)
    assert (again.added, again[:2]) == (None, first[:2])
    append(log, 4)
    second = back_up(log, folder, ".jsonl")
    assert second.added is not None
    assert (second.added.first_position, second.added.last_position) == (EVENTS + 1, EVENTS + 4)
    assert restore(folder, elsewhere, at=EVENTS + 2).position == EVENTS + 2
    assert rows_of(elsewhere) == list(log.rows())[: EVENTS + 2]


def test_a_log_in_which_threads_append_is_backed_up_as_a_prefix(log: EventLog, tmp_path: Path) -> None:
    folder, ended = tmp_path / "backup", threading.Event()

    def write(thread: int) -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            log.append([node_joined(1_000_000 * (thread + 1) + number)])

    writers = [threading.Thread(target=write, args=(thread,)) for thread in range(3)]
    for writer in writers:
        writer.start()
    try:
        heads = []
        for _ in range(5):
            before = log.last_position()
            until_blocking(lambda: log.last_position() >= before + len(writers))  # noqa: B023
            heads.append(back_up(log, folder))
    finally:
        ended.set()
        for writer in writers:
            writer.join()
    rows = list(log.rows())
    assert heads[0].position < heads[-1].position <= len(rows)
    for number, head in enumerate(heads):
        url = f"sqlite:///{tmp_path / f'{number}.db'}"
        assert restore(folder, url, at=head.position).hash == head.head
        assert rows_of(url) == rows[: head.position]


def test_of_a_log_that_was_cut_over_the_archived_part_comes_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    with closing(EventLog(url)) as log:
        append(log, EVENTS)
        rows = list(log.rows())
        archive(log, tmp_path / "archive", 8)
        back_up(log, tmp_path / "early")
    cut(url, verified_base(tmp_path / "archive", 7))
    with closing(EventLog(url)) as log:
        append(log, 1)
        rows += [row for row in log.rows() if row.position > EVENTS]
        for folder in ("late", "archive", "early"):
            assert back_up(log, tmp_path / folder).position == EVENTS + 1
            again = f"sqlite:///{tmp_path / folder / 'again.db'}"
            restore(tmp_path / folder, again)
            assert rows_of(again) == rows
    (tmp_path / "archive").rename(tmp_path / "moved")
    with closing(EventLog(url)) as log, pytest.raises(Archived):
        back_up(log, tmp_path / "fresh")
    with closing(EventLog(url, segments=tmp_path / "moved")) as log:
        assert back_up(log, tmp_path / "fresh").position == EVENTS + 1


def test_nothing_is_overwritten(log: EventLog, elsewhere: str, tmp_path: Path) -> None:
    back_up(log, tmp_path / "backup")
    with closing(EventLog(elsewhere)) as other:
        append(other, 1)
    before = rows_of(elsewhere)
    with pytest.raises(Conflict, match="has a log already"):
        restore(tmp_path / "backup", elsewhere)
    assert rows_of(elsewhere) == before


def test_an_empty_log_is_restored_to(log: EventLog, elsewhere: str, tmp_path: Path) -> None:
    EventLog(elsewhere).close()
    back_up(log, tmp_path / "backup")
    assert restore(tmp_path / "backup", elsewhere).position == EVENTS


def test_a_damaged_backup_touches_no_database(log: EventLog, tmp_path: Path) -> None:
    folder, database = tmp_path / "backup", tmp_path / "new.db"
    back_up(log, folder, ".jsonl")
    (segment,) = segments_in(folder)
    good = segment.read_bytes()
    segment.write_bytes(good.replace(b"node.joined", b"node.joimed", 1))
    with pytest.raises(Corrupt, match="was changed"):
        restore(folder, f"sqlite:///{database}")
    segment.write_bytes(good)
    with pytest.raises(InvalidInput, match="1 to 12"):
        restore(folder, f"sqlite:///{database}", at=EVENTS + 1)
    segment.rename(folder / "aside")
    with pytest.raises(NotFound, match="no segment"):
        restore(folder, f"sqlite:///{database}")
    with pytest.raises(NotFound, match="no folder"):
        restore(tmp_path / "nowhere", f"sqlite:///{database}")
    assert not database.exists()


def test_a_folder_with_what_the_log_no_longer_has_is_refused(log: EventLog, tmp_path: Path) -> None:
    """A log that was restored from an older backup goes on otherwise: its backups belong in another folder."""
    folder, url = tmp_path / "backup", f"sqlite:///{tmp_path / 'older.db'}"
    early = back_up(log, folder).position
    append(log, 3)
    back_up(log, folder)
    restore(folder, url, at=early)
    with closing(EventLog(url)) as restored:
        with pytest.raises(Corrupt, match="of another log"):
            back_up(restored, folder)
        for number in range(5):
            restored.append([node_joined(500 + number)])
        with pytest.raises(Corrupt, match="is not that of the segment"):
            back_up(restored, folder)


def test_a_log_without_events_has_no_backup(log_url: str, tmp_path: Path) -> None:
    with closing(EventLog(log_url)) as log, pytest.raises(NotFound, match="no event"):
        back_up(log, tmp_path / "backup")


@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_log_backed_up_at_any_points_and_restored_is_its_prefix(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(events, min_size=1, max_size=20, unique_by=lambda event: event.event_id))
    points = data.draw(st.sets(st.integers(1, len(drawn)), min_size=1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with closing(EventLog(f"sqlite:///{folder / 'log.db'}")) as log:
            for number, event in enumerate(drawn, start=1):
                log.append([event])
                if number in points:
                    assert back_up(log, folder / "backup").position == number
            rows = list(log.rows())
        at = data.draw(st.integers(1, max(points)))
        restore(folder / "backup", f"sqlite:///{folder / 'new.db'}", at=at)
        assert rows_of(f"sqlite:///{folder / 'new.db'}") == rows[:at]
