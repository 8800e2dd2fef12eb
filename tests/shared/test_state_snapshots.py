"""State snapshots as files: written whole or not at all, and ignored, with one line, where they do not fit the log."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from services.detector.state.cluster import DetectorState
from services.detector.state_snapshot import KEPT as DETECTOR
from services.planner.state_snapshot import KEPT as PLANNER
from shared.errors import NotFound
from shared.log.log import EventLog
from shared.service.state_snapshots import KeptState, StateSnapshots, program_sha256
from tests.kept import folded
from tests.logs.kit import golden_log, read_rows, restore

ROWS = read_rows(golden_log("demo"))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with closing(EventLog(f"sqlite:///{restore(ROWS, tmp_path / 'log.db')}", read_only=True)) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "state-snapshots"


def snapshots(folder: Path, kept: KeptState[DetectorState] = DETECTOR) -> StateSnapshots[DetectorState]:
    """As a process that has just started opens them."""
    return StateSnapshots(folder, kept)


def state_at(log: EventLog, position: int) -> DetectorState:
    return folded(DETECTOR, list(log.read_all()), position)[1]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_snapshot_goes_on_from_the_one_before_which_is_kept(log: EventLog, folder: Path) -> None:
    assert snapshots(folder).newest(log) is None
    for until in (20, 50, 50, 70):
        assert snapshots(folder).write(log, until) == until
        found = snapshots(folder).newest(log)
        assert found is not None
        assert (found.position, found.hash, found.state) == (until, ROWS[until - 1]["hash"], state_at(log, until))
    assert files(folder) == ["detector-000000000050.json", "detector-000000000070.json"]
    assert (folder.stat().st_mode & 0o777, (folder / files(folder)[0]).stat().st_mode & 0o777) == (0o700, 0o600)


def test_what_a_writer_that_was_killed_has_left_is_removed(log: EventLog, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / ".detector-000000000001.json.x1").write_bytes(b"half")
    snapshots(folder).write(log, log.last_position())
    assert len(list(folder.iterdir())) == 1


def edited(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def header(**fields: object) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        line, _, text = data.partition(b"\n")
        return json.dumps(json.loads(line) | fields).encode() + b"\n" + text

    return change


DEFECTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "header cannot be read"),
    "no text": (lambda data: b"\x00" * 20_000, "header cannot be read"),
    "cut off": (lambda data: data[:-10], "it is damaged"),
    "a byte changed": (lambda data: data[:-10] + b"x" + data[-9:], "it is damaged"),
    "longer": (lambda data: data + b" ", "it is damaged"),
    "newer format": (header(format=2), "in format 2"),
    "newer header": (header(more=1), "header cannot be read"),
    "other service": (header(service="planner"), "one of 'planner'"),
    "other program": (header(program="0" * 64), "another version"),
    "other pydantic": (header(pydantic="0.1"), "another version"),
    "other decider": (header(decider=9), "decider 9 wrote it"),
    "other log": (header(hash="0" * 64), "does not have its event at position 70"),
    "later position": (header(position=9_999), "does not have its event at position 9999"),
    "other state": (
        lambda data: header(sha256=DIGEST, size_bytes=2)(data.partition(b"\n")[0] + b"\n[]"),
        "its state cannot be read: ValidationError",
    ),
}
DIGEST = "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"
"""SHA-256 of ``[]``."""


@pytest.mark.parametrize("kind", DEFECTS)
def test_one_that_does_not_fit_is_ignored_with_one_line(
    kind: str, log: EventLog, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, why = DEFECTS[kind]
    for until in (50, 70):
        snapshots(folder).write(log, until)
    edited(folder / "detector-000000000070.json", change)
    opened = snapshots(folder)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = opened.newest(log)
            assert found is not None
            assert (found.position, found.state) == (50, state_at(log, 50))
    (line,) = caplog.messages
    assert "detector-000000000070.json is ignored" in line
    assert why in line
    # The next one takes its place, and those that do not fit go.
    assert snapshots(folder).write(log, 80) == 80
    assert files(folder) == ["detector-000000000050.json", "detector-000000000080.json"]


def test_snapshots_of_another_log_are_ignored_and_replaced(log: EventLog, folder: Path, tmp_path: Path) -> None:
    snapshots(folder).write(log, 70)
    rows = read_rows(golden_log("planned-stop"))
    with closing(EventLog(f"sqlite:///{restore(rows, tmp_path / 'other.db')}", read_only=True)) as other:
        assert snapshots(folder).newest(other) is None
        assert snapshots(folder).write(other, 10) == 10
        found = snapshots(folder).newest(other)
        assert found is not None
        assert found.state == state_at(other, 10)
    assert files(folder) == ["detector-000000000010.json"]


def test_snapshots_of_another_service_are_left_alone(log: EventLog, folder: Path) -> None:
    StateSnapshots(folder, PLANNER).write(log, 60)
    (planner,) = files(folder)
    snapshots(folder).write(log, 70)
    shutil.copy(folder / planner, folder / "detector-000000000080.json")
    found = snapshots(folder).newest(log)
    assert found is not None
    assert found.position == 70
    assert planner in files(folder)


def test_one_that_cannot_be_written_leaves_what_is_there(
    log: EventLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots(folder).write(log, 50)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        snapshots(folder).write(log, 70)
    assert files(folder) == ["detector-000000000050.json"]


def test_another_program_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotFound):
        program_sha256("some_package")
    digests = set()
    for name, text in [("__init__.py", ""), ("one.py", "x = 1"), ("one.py", "x = 2"), ("two.pyc", "x = 2")]:
        (package / name).write_text(text)
        digests.add(program_sha256("some_package"))
    assert len(digests) == 4
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "one.pyc").write_text("compiled")
    assert program_sha256("some_package") in digests
    assert replace(DETECTOR).program == program_sha256("shared", "services.detector")
