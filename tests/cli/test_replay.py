"""``unicron replay`` on the logs that the services use: a file, or a database by its URL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from sqlalchemy.engine import make_url
from typer.testing import CliRunner, Result

from cli.records.replay import replay
from services.planner.replay.replay import Replayer
from shared.errors import AccessDenied, InvalidInput, Unavailable
from shared.log.log import EventLog
from tests.logs.kit import golden_log, read_rows, restore

GOLDEN = golden_log("drained-node")


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(replay)
    return CliRunner().invoke(app, list(arguments))


def written(url: str, folder: Path) -> int:
    """Write a recorded log, at the times that its decisions used; return the number of its events."""
    folder.mkdir(exist_ok=True)
    source = EventLog(f"sqlite:///{restore(read_rows(GOLDEN), folder / 'golden.db')}", read_only=True)
    records = list(source.read_all())
    source.close()
    times = iter([record.recorded_at for record in records])
    log = EventLog(url, clock=lambda: next(times))
    for record in records:
        log.append([record.event])
    log.close()
    return len(records)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.slow
def test_a_replay_that_is_watched_finds_the_same(jobs: int, tmp_path: Path) -> None:
    rows = read_rows(golden_log("demo"))
    path = restore(rows, tmp_path / "log.db")
    seen: list[int] = []
    plain = Replayer.of_file(path)
    watched = plain.watched(seen.append)
    assert watched.verify(jobs=jobs) == plain.verify()
    assert seen == (list(range(64, len(rows) + 1, 64)) if jobs == 1 else [])
    assert watched.place_at() == plain.place_at()


@pytest.mark.slow
def test_a_log_in_postgresql_is_verified_by_its_url(postgres_url: str, tmp_path: Path) -> None:
    events = written(postgres_url, tmp_path)
    for url in (postgres_url, postgres_url.replace("postgresql+psycopg:", "postgresql:")):
        result = run(url, "--verify", "-o", "json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.output)
        assert (report["events"], report["chain_ok"], report["mismatches"]) == (events, True, [])
    assert run(postgres_url).output.startswith(f"{report['plans']} plans")


@pytest.mark.parametrize("verify", [True, False])
def test_the_log_of_the_settings_is_the_default(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    written(postgres_url, tmp_path)
    options = ["--verify"] if verify else []
    expected = run(postgres_url, *options).output
    monkeypatch.setenv("UNICRON_LOG_URL", postgres_url)
    assert run(*options).output == expected
    # A run directory that is given says otherwise.
    assert run("--run-dir", str(tmp_path), *options).exit_code != 0
    written(f"sqlite:///{tmp_path / 'log.db'}", tmp_path / "copy")
    assert run("--run-dir", str(tmp_path), *options).output == expected
    monkeypatch.delenv("UNICRON_LOG_URL")
    monkeypatch.setenv("UNICRON_RUN_DIR", str(tmp_path))
    assert run(*options).output == expected
    assert run(f"sqlite:///{tmp_path / 'log.db'}", *options).output == expected
    assert run(str(tmp_path / "log.db"), *options).output == expected


def test_a_database_is_not_changed_by_a_replay(postgres_url: str) -> None:
    """Not even where it has no log."""
    for _ in range(2):
        assert "has no event log" in str(run(postgres_url).exception)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("mysql://user:secret@host/log", InvalidInput),
        ("postgresql+psycopg2://user:secret@host/log", InvalidInput),
        ("postgresql://user:secret@host:port/log", InvalidInput),
        ("postgresql://user:secret@127.0.0.1:1/log", Unavailable),
    ],
)
def test_an_error_does_not_show_the_password(url: str, error: type[Exception]) -> None:
    found = run(url).exception
    assert isinstance(found, error)
    assert "secret" not in str(found)


def test_a_role_that_may_not_read_the_log_is_refused(postgres_url: str, tmp_path: Path) -> None:
    written(postgres_url, tmp_path)
    user = make_url(postgres_url).set(username="nobody-known").render_as_string(hide_password=False)
    assert isinstance(run(user).exception, AccessDenied)


def test_an_empty_what_if_is_refused(tmp_path: Path) -> None:
    written(f"sqlite:///{tmp_path / 'log.db'}", tmp_path)
    with pytest.raises(InvalidInput, match=r"--what-if: '' must be KEY=VALUE,..."):
        replay([str(tmp_path / "log.db")], what_if="")
