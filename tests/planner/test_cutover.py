"""A log that was cut over: replay with and without its segments, how far it may be cut, services that start on it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from cli.records.archive import archive as archive_verb
from cli.records.replay import replay
from services.detector.state_snapshot import KEPT as DETECTOR
from services.planner.main import serve
from services.planner.replay.cut_limit import CutLimit, cut_limit
from services.planner.replay.replay import Replayer
from services.planner.replay.sources import LogSource
from services.planner.replay.verification import Report
from services.planner.state_snapshot import KEPT as PLANNER
from services.transition.state_snapshot import KEPT as TRANSITION
from shared.archive.cutover import cut
from shared.archive.writing import archive
from shared.bus.connection import Bus
from shared.errors import Archived, Conflict, InvalidInput
from shared.events.union import PlanDecided
from shared.log.anchors import Anchor
from shared.log.archived import verified_base
from shared.log.base import Base
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.log.segments import segments_in
from shared.service.frame import Context
from shared.service.state_keeper import folder_of
from shared.service.state_snapshots import KeptState, StateSnapshots
from shared.settings.model import Settings
from tests.condition import until
from tests.logs.kit import Row, golden_log, read_rows, restore
from tests.planner.test_shell import node, planner, plans, submission
from tests.shared.samples import node_joined

ROWS = list(takewhile(lambda row: row["type"] != "node.left", read_rows(golden_log("demo"))))
"""Up to where the stack was stopped: nobody has answered what came after that."""
ENDS = (31, 62)
"""Positions before which segments end."""
BASE = 45
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded log, whole (whole.db), and archived and cut over (log.db, segments)."""
    folder = tmp_path_factory.mktemp("cut")
    restore(ROWS, folder / "whole.db")
    restore(ROWS, folder / "log.db")
    with closing(EventLog(live(folder), read_only=True)) as log:
        for end in ENDS:
            archive(log, folder / "segments", end)
    cut(live(folder), verified_base(folder / "segments", BASE))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def live(folder: Path) -> str:
    return f"sqlite:///{folder / 'log.db'}"


def judged(folder: Path) -> Report:
    return Replayer.of_segments(segments_in(folder / "segments"), live(folder)).verify()


def problems(report: Report) -> list[str]:
    return [problem.what for problem in report.problems]


def run(verb: Callable[..., None], *arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_with_its_segments_it_is_verified_as_the_whole_log(folder: Path) -> None:
    whole = Replayer.of_file(folder / "whole.db")
    replayer = Replayer.of_segments(segments_in(folder / "segments"), live(folder))
    assert whole.verify().ok
    assert replayer.verify() == whole.verify()
    for position in (BASE, BASE + 1, 5, None):
        assert replayer.place_at(position) == whole.place_at(position)
    assert run(replay, folder / "segments", folder / "log.db", "--verify").exit_code == 0


@pytest.mark.slow
def test_alone_its_chain_is_checked_from_the_base_on_and_no_plan_is_judged(folder: Path) -> None:
    replayer = Replayer.of_url(live(folder))
    report = replayer.verify([Anchor(ROWS[BASE - 1]["hash"], BASE), Anchor(ROWS[3]["hash"], 4)])
    assert (report.begins_after, report.events, report.verified) == (BASE, len(ROWS) - BASE, 0)
    assert (report.sound, report.ok, report.head) == (True, False, ROWS[-1]["hash"])
    assert [record.position for record in replayer.records] == list(range(BASE + 1, len(ROWS) + 1))
    assert replayer.verify(jobs=2) == replayer.verify()
    assert problems(replayer.verify([Anchor("0" * 64, BASE)])) != []
    shown = run(replay, folder / "log.db", "--verify")
    assert f"begins behind position {BASE}, archived" in shown.output
    assert shown.exit_code == 4
    with pytest.raises(Archived, match=f"behind position {BASE}.*segments"):
        replayer.state_at()


def forged(folder: Path, *statements: str, digest: bool) -> None:
    """Change the base as somebody would who can write the file: the guards are there again afterwards."""
    with closing(sqlite3.connect(folder / "log.db")) as connection, connection:
        guards = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            connection.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            connection.execute(statement)
        if digest:
            position, row_hash, time = connection.execute("SELECT position, hash, recorded_at FROM log_base").fetchone()
            base = Base(
                position,
                row_hash,
                time,
                dict(connection.execute("SELECT stream, version FROM log_base_streams").fetchall()),
            )
            connection.execute("UPDATE log_base SET sha256 = ?", (base.sha256(),))
        for _, sql in guards:
            connection.execute(sql)


STREAM = "cluster"

FORGERIES = {
    "hash": (f"UPDATE log_base SET hash = '{'1' * 64}'", f"the live log's base has the hash {'1' * 64}"),
    "time": ("UPDATE log_base SET recorded_at = '2020'", "the live log's base has the recorded_at 2020"),
    "version": (
        f"UPDATE log_base_streams SET version = 70 WHERE stream = '{STREAM}'",
        f"the live log's base has version 70 of stream {STREAM}",
    ),
    "stream removed": (
        f"DELETE FROM log_base_streams WHERE stream = '{STREAM}'",
        f"the live log's base has version 0 of stream {STREAM}",
    ),
    "stream added": ("INSERT INTO log_base_streams VALUES ('node/x', 1)", "version 1 of stream node/x"),
    "position": ("UPDATE log_base SET position = 44", "position 44: the live log's base has the hash"),
}


@pytest.mark.parametrize("name", ["hash", *(pytest.param(n, marks=pytest.mark.slow) for n in FORGERIES if n != "hash")])
def test_a_base_that_was_changed_is_named(name: str, folder: Path) -> None:
    statement, named = FORGERIES[name]
    assert problems(judged(folder)) == []
    forged(folder, statement, digest=True)
    assert any(named in problem for problem in problems(judged(folder)))


@pytest.mark.parametrize("name", FORGERIES)
def test_a_base_that_was_changed_without_its_digest_is_named_without_segments(name: str, folder: Path) -> None:
    forged(folder, FORGERIES[name][0], digest=False)
    report = Replayer.of_url(live(folder)).verify()
    assert any("does not have its digest" in problem for problem in problems(report))
    assert run(replay, folder / "log.db", "--verify").exit_code == 6
    with closing(EventLog(live(folder), read_only=True)) as log:
        assert "does not have its digest" in log.verify().problem


def test_a_base_that_was_removed_and_a_row_behind_it_are_named(folder: Path) -> None:
    forged(folder, f"DELETE FROM log WHERE position = {BASE + 1}", digest=False)
    alone = Replayer.of_url(live(folder)).verify()  # with the segments, theirs counts: they have that position too
    assert f"position {BASE + 1} is missing: {BASE + 2} follows {BASE}" in problems(alone)
    forged(folder, f"DELETE FROM log WHERE position = {ENDS[1]}", digest=False)
    assert f"position {ENDS[1]} is missing: {ENDS[1] + 1} follows {ENDS[1] - 1}" in problems(judged(folder))
    with closing(sqlite3.connect(folder / "log.db")) as connection, connection:
        connection.execute("DROP TABLE log_base")
    found = problems(Replayer.of_url(live(folder)).verify())
    assert f"position 1 is missing: {BASE + 2} follows 0" in found
    assert "the table lacks the trigger log_no_replace as it was created" in found


def test_segments_that_end_before_the_base_are_named(folder: Path) -> None:
    one = segments_in(folder / "segments")[0]
    report = Replayer.of_segments([one], live(folder)).verify()
    assert f"position {BASE}: the live log begins behind it, and no segment that was given has it" in problems(report)


# ---- how far


def limit_of(rows: list[Row], path: Path, later: timedelta = timedelta(days=3)) -> CutLimit:
    """The limit of a log of these rows, and an event that is recorded so much later."""
    restore(rows, path)
    newest = datetime.fromisoformat(rows[-1]["recorded_at"]) + later
    with closing(EventLog(f"sqlite:///{path}", clock=lambda: newest)) as log:
        log.append([node_joined(10_000, "another").model_copy(update={"occurred_at": newest})])
    return cut_limit(LogSource(partial(EventLog, f"sqlite:///{path}", read_only=True)))


def at(kind: str, number: int = 0) -> int:
    """The position of an event of a type."""
    return int([row["position"] for row in ROWS if row["type"] == kind][number])


def test_the_last_day_stays(tmp_path: Path) -> None:
    found = limit_of(ROWS, tmp_path / "log.db", timedelta(minutes=1))
    assert found.position == 0
    assert "may be appended again" in found.reason
    assert limit_of(ROWS, tmp_path / "later.db").position == len(ROWS)


def test_a_plan_that_is_under_way_stays(tmp_path: Path) -> None:
    plan = at("plan.decided", 4)
    cause = json.loads(ROWS[plan - 1]["data"])["cause"]
    (position,) = [row["position"] for row in ROWS if row["event_id"] == cause]
    found = limit_of(ROWS[:plan], tmp_path / "log.db")
    assert (found.position, "is under way" in found.reason) == (position - 1, True)


def test_a_cause_without_an_answer_stays(tmp_path: Path) -> None:
    submitted = at("task.submitted", 0)
    found = limit_of(ROWS[:submitted], tmp_path / "log.db")
    assert found.position == submitted - 1
    assert found.reason == f"the planner has not answered the event at position {submitted}"


# ---- the verb


def test_the_verb_archives_cuts_and_refuses(tmp_path: Path) -> None:
    restore(ROWS, tmp_path / "log.db")
    arguments = tmp_path / "segments", "--log", tmp_path / "log.db"
    refused = run(archive_verb, *arguments, "--before", "40", "--cut")
    assert isinstance(refused.exception, Conflict)
    assert "only behind 0 or before" in refused.exception.detail
    later = datetime.fromisoformat(ROWS[-1]["recorded_at"]) + timedelta(days=3)
    with closing(EventLog(live(tmp_path), clock=lambda: later)) as log:
        log.append([node_joined(10_000, "another")])
        open_elsewhere = run(archive_verb, *arguments, "--before", "40", "--cut")
        assert isinstance(open_elsewhere.exception, Conflict)
        assert "stop all services" in open_elsewhere.exception.detail
    nothing = run(archive_verb, *arguments, "--before", "1", "--cut")
    assert isinstance(nothing.exception, InvalidInput)
    done = run(archive_verb, *arguments, "--before", "40", "--cut", "-o", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["begins_after"] == 39
    again = run(archive_verb, *arguments, "--before", "40", "--cut")
    assert again.output.splitlines()[-1] == "the log begins behind position 39 already"
    day = later.date().isoformat()
    further = run(archive_verb, *arguments, "--before", day, "--cut")
    assert further.exit_code == 0, further.output
    assert f"the log begins behind position {len(ROWS)}; what it was is" in further.output
    assert judged(tmp_path).events == len(ROWS) + 1


# ---- services


@pytest.mark.parametrize("kept", [PLANNER, DETECTOR, TRANSITION], ids=lambda kept: kept.service)
def test_states_from_segments_and_from_snapshots_are_those_of_the_whole_log(kept: KeptState[Any], folder: Path) -> None:
    last = len(ROWS)
    snapshots, segments = StateSnapshots(folder / "snapshots", kept), folder / "segments"
    with closing(EventLog(f"sqlite:///{folder / 'whole.db'}", read_only=True)) as log:
        whole = kept.fold(log, kept.kind(), 0, last)
        assert snapshots.write(log, BASE + 20) > BASE
    with closing(EventLog(live(folder), read_only=True, segments=segments)) as log:
        assert kept.fold(log, kept.kind(), 0, last) == whole
    segments.rename(folder / "away")
    with closing(EventLog(live(folder), read_only=True, segments=segments)) as log:
        with pytest.raises(Archived):
            kept.fold(log, kept.kind(), 0, last)
        found = snapshots.newest(log)
        assert found is not None
        assert kept.fold(log, found.state, found.position, last) == whole


async def test_a_planner_starts_on_a_cut_log_and_goes_on(settings: Settings, bus: Bus, tmp_path: Path) -> None:
    url = settings.log_database_url
    with closing(EventLog(url)) as log:
        async with Journal(log, bus) as journal, planner(settings, bus, journal):
            await journal.append([node("n0"), submission("a")])
            await until(lambda: len(plans(log)) == 2)
        archive(log, tmp_path / "segments", log.last_position() + 1)
        last = log.last_position()
    cut(url, verified_base(tmp_path / "segments", last))
    with closing(EventLog(url)) as log:
        async with Journal(log, bus) as journal, planner(settings, bus, journal):
            await journal.append([submission("b")])
            await until(lambda: len(plans(log)) == 3)
        assert [plan.plan for plan in plans(log)] == ["p1", "p2", "p3"]
        assert [row.position for row in log.rows()] == [last + 1, last + 2]
    assert Replayer.of_segments(segments_in(tmp_path / "segments"), url).verify().verified == 3
    (tmp_path / "segments").rename(tmp_path / "away")
    with closing(EventLog(url)) as log:
        async with Journal(log, bus) as journal:
            with pytest.raises(Archived, match="UNICRON_LOG_SEGMENTS"):
                async with asyncio.timeout(LIMIT_S):
                    await serve(Context(settings, bus, journal, asyncio.Event(), "planner"))


async def test_a_planner_starts_from_a_snapshot_on_a_cut_log_without_the_segments(
    settings: Settings, bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The segments may be on another machine by then: what lies in them is in the snapshot."""
    caplog.set_level(logging.INFO)
    url = settings.log_database_url
    with closing(EventLog(url)) as log:
        async with Journal(log, bus) as journal, planner(settings, bus, journal):
            await journal.append([node("n0"), submission("a")])
            await until(lambda: len(plans(log)) == 2)
        last = log.last_position()
        assert StateSnapshots(folder_of(settings), PLANNER).write(log, last) == last
        archive(log, tmp_path / "segments", last + 1)
    cut(url, verified_base(tmp_path / "segments", last))
    (tmp_path / "segments").rename(tmp_path / "away")
    with closing(EventLog(url)) as log:
        async with Journal(log, bus) as journal, planner(settings, bus, journal):
            await journal.append([submission("b")])
            await until(lambda: log.last_position() == last + 2)
        [_, decided] = log.read(after=last)
        assert isinstance(decided.event, PlanDecided)
        assert decided.event.plan == "p3"
    assert f"starts from the state snapshot at position {last}" in caplog.text
    assert Replayer.of_segments(segments_in(tmp_path / "away"), url).verify().verified == 3
