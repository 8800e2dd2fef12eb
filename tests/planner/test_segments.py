"""Replay of archived segments: they and the live log are one chain; what is missing, doubled or altered is named."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cli.records.archive import archive as archive_verb
from cli.records.replay import replay
from services.planner.replay import verification_jobs
from services.planner.replay.replay import Replayer
from services.planner.replay.segments import SegmentsSource
from services.planner.replay.verification import Report
from shared.archive.writing import archive
from shared.errors import InvalidInput, NotFound
from shared.log.anchors import Anchor
from shared.log.log import EventLog
from shared.log.scan import Scan
from shared.log.schema import COLUMNS, StoredRow
from shared.log.segments import read_rows, segments_in
from shared.model import canonical_json
from tests.logs.kit import forge, golden_log, restore
from tests.logs.kit import read_rows as golden_rows
from tests.planner.test_verification_jobs import Here
from tests.shared.samples import node_joined

ROWS = golden_rows(golden_log("demo"))
CUTS = (31, 62)
"""Positions at which segments begin. Causes and their plans lie on both sides of each."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log, and two segments of it."""
    folder = tmp_path_factory.mktemp("segments")
    restore(ROWS, folder / "log.db")
    with closing(EventLog(f"sqlite:///{folder / 'log.db'}", read_only=True)) as log:
        for cut in CUTS:
            assert archive(log, folder / "segments", cut) is not None
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def live(folder: Path) -> str:
    return f"sqlite:///{folder / 'log.db'}"


def judged(segments: list[Path], url: str = "") -> Report:
    return Replayer.of_segments(segments, url).verify()


def problems(report: Report) -> list[str]:
    return [problem.what for problem in report.problems]


def test_segments_and_the_live_log_are_verified_as_the_log_they_came_from(folder: Path) -> None:
    segments = segments_in(folder / "segments")
    whole = Replayer.of_file(folder / "log.db")
    assert whole.verify().ok
    replayer = Replayer.of_segments(segments, live(folder))
    assert replayer.verify() == whole.verify()
    assert replayer.records == whole.records
    for position in (*CUTS, 5, None):
        assert replayer.place_at(position) == whole.place_at(position)
    alone = Replayer.of_segments(segments)
    assert alone.verify().ok
    assert alone.verify().events == CUTS[1] - 1
    anchor = Anchor(ROWS[9]["hash"], 10)
    assert alone.verify([anchor]).ok
    assert not alone.verify([Anchor("0" * 64, 10)]).ok


def test_a_live_log_that_begins_behind_the_segments_is_read_with_them(folder: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{rest(tmp_path / 'rest.db')}"
    assert judged(segments_in(folder / "segments"), url) == Replayer.of_file(folder / "log.db").verify()
    assert problems(Replayer.of_url(url).verify())[0].startswith("position 1 is missing: 62 follows 0")


def rest(path: Path) -> Path:
    """A log that begins at the second cut. Its triggers, which refuse that, are there."""
    EventLog(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as connection, connection:
        (sql,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'log_no_replace'").fetchone()
        connection.execute("DROP TRIGGER log_no_replace")
        for row in ROWS[CUTS[1] - 1 :]:
            connection.execute(f"INSERT INTO log VALUES ({', '.join('?' * len(row))})", [row[c] for c in COLUMNS])
        connection.execute(sql)
    return path


def test_a_missing_segment_is_named(folder: Path) -> None:
    one, two = segments_in(folder / "segments")
    found = problems(judged([two], live(folder)))
    assert "position 1 is missing: 31 follows 0" in found
    assert f"positions 1 to 30: no segment before {two.name} was given" in found
    # The live log has what is missing here, and is not asked: the segments' order is what is judged.
    with closing(EventLog(live(folder), read_only=True)) as log:
        assert archive(log, folder / "segments", 80) is not None
    three = segments_in(folder / "segments")[2]
    found = problems(judged([one, three], live(folder)))
    assert "position 31 is missing: 62 follows 30" in found
    assert f"positions 31 to 61: a segment between {one.name} and {three.name} is missing" in found


def test_a_doubled_segment_is_named(folder: Path) -> None:
    one, two = segments_in(folder / "segments")
    report = judged([one, one, two], live(folder))
    assert not report.ok
    assert f"positions 1 to 30 are in {one.name} and again in {one.name}" in problems(report)
    assert "position 31 is missing: 1 follows 30" in problems(report)


def altered(path: Path, rows: list[StoredRow]) -> None:
    """Write a segment anew with other rows; its manifest stays."""
    path.write_bytes(gzip.compress("".join(f"{canonical_json(row._asdict())}\n" for row in rows).encode(), mtime=0))


def test_an_altered_segment_is_named(folder: Path) -> None:
    one, two = segments_in(folder / "segments")
    rows = list(read_rows(two))
    assert [row.position for row in rows] == list(range(*CUTS))
    price = rows[4].data.replace('"occurred_at":"2', '"occurred_at":"1')
    altered(two, [*rows[:4], rows[4]._replace(data=price), *rows[5:]])
    report = judged([one, two], live(folder))
    assert "position 35: the row does not match its hash" in problems(report)
    changed = [what for what in problems(report) if "was changed, or its manifest" in what]
    assert changed[0].startswith(f"positions 31 to 61: {two.name}")
    # With the chain computed anew up to its end: the next part does not continue it.
    forged_rows = forge(ROWS[:61], lambda event: event.update(occurred_at="2020-01-01T00:00:00Z"))
    altered(two, [StoredRow(**row) for row in forged_rows[30:]])
    found = problems(judged([one, two], live(folder)))
    assert "position 31: previous_hash is not the hash of the row before" in found
    assert "position 62: previous_hash is not the hash of the row before" in found


def test_a_segment_that_is_cut_off_or_has_no_manifest_is_named(folder: Path) -> None:
    one, two = segments_in(folder / "segments")
    data = two.read_bytes()
    two.write_bytes(data[: len(data) // 2])
    report = judged([one, two], live(folder))
    assert not report.chain_ok
    assert any("cannot be read behind line" in what for what in problems(report))
    two.write_bytes(data)
    two.with_name(f"{two.name}.manifest.json").unlink()
    assert problems(judged([one, two], live(folder))) == [
        f"segment {two} has no manifest, {two.name}.manifest.json",
    ]


def test_an_id_that_two_segments_have_is_named(folder: Path) -> None:
    one, two = segments_in(folder / "segments")
    rows = list(read_rows(two))
    altered(two, [*rows[:-1], rows[-1]._replace(event_id=ROWS[2]["event_id"])])
    found = problems(judged([one, two], live(folder)))
    assert f"position 61: event id {ROWS[2]['event_id']} is that of position 3 too" in found


def intact(folder: Path) -> list[Path]:
    return segments_in(folder / "segments")


def without_first(folder: Path) -> list[Path]:
    return segments_in(folder / "segments")[1:]


def cut_off(folder: Path) -> list[Path]:
    """The second segment ends in the middle of a row."""
    segments = segments_in(folder / "segments")
    segments[1].write_bytes(segments[1].read_bytes()[:-200])
    return segments


def forged(folder: Path) -> list[Path]:
    """A plan in each segment says another incident."""
    segments = segments_in(folder / "segments")
    for path in segments:
        rows = list(read_rows(path))
        plan = next(index for index, row in enumerate(rows) if row.type == "plan.decided")
        event = json.loads(rows[plan].data) | {"incident": "another"}
        rows[plan] = rows[plan]._replace(data=canonical_json(event))
        altered(path, rows)
    return segments


def with_a_trigger_less(folder: Path) -> list[Path]:
    """The live log could be changed."""
    with closing(sqlite3.connect(folder / "log.db")) as connection, connection:
        connection.execute("DROP TRIGGER log_no_update")
    return segments_in(folder / "segments")


@pytest.mark.parametrize("made_of", [intact, without_first, cut_off, forged, with_a_trigger_less])
@pytest.mark.parametrize("with_live", [True, False], ids=["live", "archived"])
def test_several_processes_report_of_segments_what_one_does(
    made_of: Callable[[Path], list[Path]], with_live: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification_jobs, "ProcessPoolExecutor", Here)
    replayer = Replayer.of_segments(made_of(folder), live(folder) if with_live else "")
    anchors = [Anchor("0" * 64, 9), Anchor(ROWS[40]["hash"], 41)]
    whole = replayer.verify(anchors)
    assert [replayer.verify(anchors, jobs=jobs) for jobs in (2, 3)] == [whole, whole]
    assert replayer.verify(jobs=2).ok == (made_of is intact or (made_of is with_a_trigger_less and not with_live))


def test_each_process_ends_where_the_live_log_ended_at_first(folder: Path) -> None:
    with closing(EventLog(live(folder))) as log:
        source = SegmentsSource(segments_in(folder / "segments"), partial(EventLog, live(folder), read_only=True))
        one = source.as_it_is()
        log.append([node_joined(1)])
        assert [row.position for row in one.rows(Scan())] == list(range(1, len(ROWS) + 1))
        assert len(list(source.rows(Scan()))) == len(ROWS) + 1
        assert list(one.answers()) == list(source.answers())


@pytest.mark.slow
def test_the_command_verifies_segments_by_several_processes(tmp_path: Path) -> None:
    """Plans of this decider, which are decided again."""
    rows = golden_rows(golden_log("planned-stop"))
    with closing(EventLog(f"sqlite:///{restore(rows, tmp_path / 'log.db')}", read_only=True)) as log:
        for cut in (10, 20):
            archive(log, tmp_path / "segments", cut)
    parts = [str(tmp_path / "segments"), str(tmp_path / "log.db")]
    result = run(replay, *parts, "--verify", "--jobs", "2", "-o", "json")
    assert result.exit_code == 0
    report = Report.model_validate_json(result.output)
    assert report == Replayer.of_file(tmp_path / "log.db").verify()
    assert report.verified > 0


def run(verb: object, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(verb)  # type: ignore[type-var]
    return CliRunner().invoke(app, list(arguments))


def test_the_commands_archive_and_replay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments, log = str(folder / "other"), str(folder / "log.db")
    before = (folder / "log.db").read_bytes()
    result = run(archive_verb, segments, "--before", "31", "--log", log, "-o", "json")
    assert (result.exit_code, json.loads(result.output)["last_position"]) == (0, 30)
    monkeypatch.setenv("UNICRON_LOG_URL", live(folder))
    day = ROWS[-1]["recorded_at"][:10]
    assert "has all events before" in run(archive_verb, segments, "--before", day).output
    assert (
        f"positions 31 to {len(ROWS)}, {len(ROWS) - 30} events"
        in run(archive_verb, segments, "--before", "999", "--format", "jsonl").output
    )
    assert isinstance(run(archive_verb, segments, "--before", "yesterday").exception, InvalidInput)
    assert (folder / "log.db").read_bytes() == before
    expected = run(replay, log, "--verify").output
    for parts in ([segments], [segments, log], [str(path) for path in segments_in(Path(segments))]):
        result = run(replay, *parts, "--verify")
        assert (result.exit_code, result.output) == (0, expected)
    one, two = (str(path) for path in segments_in(Path(segments)))
    assert run(replay, two, log, "--verify").exit_code == 6
    assert run(replay, one, log).output == run(replay, log).output
    refused = run(replay, log, one).exception
    assert isinstance(refused, InvalidInput)
    assert "segments stand before it" in refused.detail
    assert isinstance(run(replay, str(folder / "none.jsonl")).exception, NotFound)
