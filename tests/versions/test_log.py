"""Logs of a newer or an older version: strict, with an error that names position, type and version."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app, main
from services.planner import main as planner
from services.planner.replay.replay import Replayer
from shared.bus.connection import Bus
from shared.errors import Conflict, Corrupt, NewerVersion, OlderVersion
from shared.events.union import OLDEST_DECIDER
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.service.frame import Context
from shared.settings.model import Settings
from tests.shared.samples import event_id, node_joined, plan
from tests.shared.test_upcast import append_raw, moved
from tests.versions.kit import extended


def joined(number: int, **fields: Any) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(node_joined(number).canonical())
    return {**event, **fields}


NEWER = [
    (joined(2, type="task.dreamt"), "event 'task.dreamt', schema version 1: its type is not known here"),
    (joined(2, schema_version=7), "event 'node.joined', schema version 7: version 1 is the newest known here"),
    (joined(2, rack={"row": 3}), "event 'node.joined', schema version 1: not known here: rack"),
    (
        {**json.loads(moved(event_id=event_id(2)).canonical()), "schema_version": 4},
        "event 'state.moved', schema version 4: version 2 is the newest known here",
    ),
    (
        joined(2, schema_version=2, workers="n0/0"),
        "event 'node.joined', schema version 2: version 1 is the newest known here",
    ),
]


def newer_log(tmp_path: Path, event: dict[str, Any]) -> str:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    EventLog(url).close()
    append_raw(url, json.loads(moved().canonical()), event)
    return url


@pytest.mark.parametrize(("event", "words"), NEWER)
def test_an_event_of_a_newer_version_is_named_and_no_service_skips_it(
    tmp_path: Path, event: dict[str, Any], words: str
) -> None:
    log = EventLog(newer_log(tmp_path, event), read_only=True)
    with pytest.raises(NewerVersion, match=re.escape(f"position 2: {words}; a newer version of Unicron")) as refused:
        log.read()
    assert refused.value.extra["position"] == 2
    assert refused.value.extra["type"] == event["type"]
    assert refused.value.extra["schema_version"] == event["schema_version"]
    assert len(log.read(limit=1)) == 1
    report = log.verify()
    assert (report.ok, report.events) == (True, 2), "the chain covers what is not known here"
    assert [skipped.what for skipped in report.skipped] == [f"position 2: {words}"]
    log.close()


def of_next_version(number: int) -> dict[str, Any]:
    return extended(joined(number, schema_version=2))  # type: ignore[no-any-return]


def test_a_service_reads_what_the_next_version_writes_but_for_its_new_fields(tmp_path: Path) -> None:
    with closing(EventLog(newer_log(tmp_path, of_next_version(2)))) as log:
        assert [record.event for record in log.read()] == [moved(), node_joined(2)]
        # Both decide the same of the same cause: the one that takes over appends it again.
        (again,) = log.append([node_joined(2)])
        assert again.position == 2
        with pytest.raises(Conflict, match="with different content"):
            log.append([node_joined(2, "n1")])
        assert log.verify().ok
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "log.db")]).stdout
    assert "node n0" in shown
    assert "skipped: position 2: event 'node.joined', schema version 2" in shown


def test_a_damaged_event_is_no_newer_one(tmp_path: Path) -> None:
    log = EventLog(newer_log(tmp_path, joined(2, workers="n0/0")), read_only=True)
    with pytest.raises(Corrupt, match=r"position 2: event 'node\.joined', schema version 1: not an event"):
        log.read()
    log.close()


@pytest.mark.parametrize(("event", "words"), NEWER)
def test_replay_goes_on_behind_it_and_says_what_it_skipped(tmp_path: Path, event: dict[str, Any], words: str) -> None:
    newer_log(tmp_path, event)
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "log.db"), "--verify", "-o", "json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 6, "the log has an execution of no plan, too"
    assert (report["events"], report["chain_ok"]) == (2, True)
    assert [part["what"] for part in report["skipped"]] == [f"position 2: {words}"]
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "log.db")])
    assert result.exit_code == 0
    assert f"skipped: position 2: {words}" in result.stdout
    assert ("node n0" in result.stdout) == ("rack" in event), "of an event with unknown fields, the others count"


async def test_a_service_ends_with_these_words_before_it_decides_anything(
    tmp_path: Path, settings: Settings, bus: Bus
) -> None:
    log = EventLog(newer_log(tmp_path, NEWER[2][0]))
    journal = Journal(log, bus)
    with pytest.raises(NewerVersion, match=r"position 2: .* not known here: rack"):
        await planner.serve(Context(settings, bus, journal, asyncio.Event(), "planner"))
    assert log.last_position() == 2
    log.close()


# ---- older ones


def planned(**fields: Any) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(plan(2, {3: 1.0}).canonical())
    return {**event, **fields}


OLDER = [
    (
        {**json.loads(moved(event_id=event_id(2)).canonical()), "schema_version": 1},
        "event 'state.moved', schema version 1: version 2 is the oldest readable here",
    ),
    (
        {**json.loads(moved(event_id=event_id(2)).canonical()), "schema_version": 1, "dropped": 7},
        "event 'state.moved', schema version 1: version 2 is the oldest readable here",
    ),
    (
        planned(decider=OLDEST_DECIDER - 1),
        f"its plan is of decider {OLDEST_DECIDER - 1}, and decider {OLDEST_DECIDER} is the oldest readable here",
    ),
    (
        {name: value for name, value in planned().items() if name != "decider"},
        f"its plan is of decider 1, and decider {OLDEST_DECIDER} is the oldest readable here",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "words"),
    OLDER,
)
def test_a_log_of_an_older_version_is_refused_by_name(tmp_path: Path, event: dict[str, Any], words: str) -> None:
    log = EventLog(newer_log(tmp_path, event), read_only=True)
    replayer = Replayer.of_file(tmp_path / "log.db")
    for ask in (log.read, log.verify, replayer.verify, lambda: replayer.verify(jobs=2), replayer.place_at):
        with pytest.raises(OlderVersion, match=re.escape(words)) as refused:
            ask()
        assert refused.value.detail.startswith("position 2: ")
        assert refused.value.detail.endswith("go on with that version, or begin an empty log with this one")
    assert len(log.read(limit=1)) == 1
    log.close()


def test_the_command_says_what_to_do_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer_log(tmp_path, OLDER[0][0])
    for arguments in (["--verify"], []):
        code = main(["replay", str(tmp_path / "log.db"), *arguments, "-o", "json"])
        problem = json.loads(capsys.readouterr().err)
        assert (code, problem["code"]) == (4, "older-version")
        assert "an older version of Unicron has written this log" in problem["detail"]


@pytest.mark.parametrize(("event", "words"), OLDER)
async def test_no_service_starts_on_it(
    tmp_path: Path, settings: Settings, bus: Bus, event: dict[str, Any], words: str
) -> None:
    log = EventLog(newer_log(tmp_path, event))
    journal = Journal(log, bus)
    with pytest.raises(OlderVersion, match=re.escape(words)):
        await planner.serve(Context(settings, bus, journal, asyncio.Event(), "planner"))
    assert log.last_position() == 2
    log.close()


def forge(tmp_path: Path, text: str) -> None:
    """Put another text in the place of the second event."""
    with closing(sqlite3.connect(tmp_path / "log.db")) as connection, connection:
        for trigger in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger[0]}")
        connection.execute("UPDATE log SET data = ? WHERE position = 2", [text])


def test_an_event_whose_row_is_damaged_is_not_appended_again(tmp_path: Path) -> None:
    url = newer_log(tmp_path, joined(2))
    forge(tmp_path, "{")
    with closing(EventLog(url)) as log, pytest.raises(Conflict, match="with different content"):
        log.append([node_joined(2)])


def test_a_forged_row_is_no_older_one(tmp_path: Path) -> None:
    """Its hash shows that nobody has appended it so."""
    newer_log(tmp_path, planned())
    forge(tmp_path, json.dumps(planned(decider=1), sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    report = Replayer.of_file(tmp_path / "log.db").verify()
    assert "position 2: the row does not match its hash" in [problem.what for problem in report.problems]
