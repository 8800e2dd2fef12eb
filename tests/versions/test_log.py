"""Logs of a newer version: strict, with an error that names position, type and version."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from services.planner import main as planner
from shared.bus import Bus
from shared.errors import Corrupt, NewerVersion
from shared.log.journal import Journal
from shared.log.log import EventLog
from shared.service import Context
from shared.settings import Settings
from tests.shared.samples import event_id, node_joined
from tests.shared.test_upcast import append_raw, moved


def joined(number: int, **fields: Any) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(node_joined(number).canonical())
    return {**event, **fields}


NEWER = [
    (joined(2, type="task.dreamt"), "event 'task.dreamt', schema version 1: its type is not known here"),
    (joined(2, schema_version=7), "event 'node.joined', schema version 7: version 1 is the newest known here"),
    (joined(2, rack={"row": 3}), "event 'node.joined', schema version 1: not known here: rack"),
    (
        {**json.loads(moved(event_id=event_id(2)).canonical()), "schema_version": 3},
        "event 'state.moved', schema version 3: version 2 is the newest known here",
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
