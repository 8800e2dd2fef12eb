"""Signed heads: one for each day that is over, genuine with the key, and anchors of the log that was there."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from services.api.signed_heads import SignedHeads
from shared.archive.signed_heads import append_heads, read_heads, read_key
from shared.errors import Corrupt, InvalidInput
from shared.log.log import EventLog
from shared.settings.model import Settings
from tests.shared.samples import node_joined

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    key = tmp_path / "key"
    key.write_text("a key that nobody guesses\n")
    return Settings(run_dir=tmp_path, log_key_file=key)


@pytest.fixture
def log(log_url: str) -> EventLog:
    """Two events of March 1, one of March 2, none of March 3, one of March 4."""
    days = iter([0, 0, 1, 3])
    found = EventLog(log_url, clock=lambda: NOON + timedelta(days=next(days)))
    for number in range(1, 5):
        found.append([node_joined(number)])
    return found


def test_each_day_that_is_over_and_has_events_gets_one_head(settings: Settings, log: EventLog) -> None:
    hashes = [record.hash for record in log.read()]
    now = NOON
    heads = SignedHeads(settings, log, clock=lambda: now)
    assert heads.sign() == heads.read() == []
    now = NOON + timedelta(days=2)
    signed = heads.sign()
    assert [(head.day, head.position, head.hash) for head in signed] == [
        (date(2026, 3, 1), 2, hashes[1]),
        (date(2026, 3, 2), 3, hashes[2]),
    ]
    assert heads.sign() == []
    now = NOON + timedelta(days=9)
    assert [head.position for head in heads.sign()] == [4]
    assert settings.log_key_file is not None
    key = read_key(settings.log_key_file)
    assert all(head.is_genuine(key) for head in heads.read())
    assert not any(head.is_genuine(key + b"!") for head in heads.read())
    assert not signed[0].model_copy(update={"position": 3}).is_genuine(key)
    unsigned = SignedHeads(Settings(run_dir=settings.run_dir / "other"), log, clock=lambda: now)
    assert unsigned.sign() == unsigned.read() == []
    log.close()


def test_replay_compares_a_log_with_its_signed_heads(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, heads = tmp_path / "log.db", tmp_path / "heads.jsonl"
    days = iter([0, 1, 2])
    log = EventLog(f"sqlite:///{path}", clock=lambda: NOON + timedelta(days=next(days)))
    for number in range(1, 4):
        log.append([node_joined(number)])
    signer = SignedHeads(settings, log, clock=lambda: NOON + timedelta(days=9))
    signer.sign()

    def problems() -> list[str]:
        result = CliRunner().invoke(app, ["replay", str(path), "--verify", "--heads", str(heads), "-o", "json"])
        return [problem["what"] for problem in json.loads(result.stdout)["problems"]]

    result = CliRunner().invoke(app, ["replay", str(path), "--verify", "--heads", str(heads)])
    assert isinstance(result.exception, InvalidInput)
    monkeypatch.setenv("UNICRON_LOG_KEY_FILE", str(settings.log_key_file))
    assert problems() == []
    (forged, *rest) = genuine = read_heads(heads)
    heads.unlink()
    append_heads(heads, [forged.model_copy(update={"hash": "0" * 64}), *rest])
    forgery = "the signature of the head of 2026-03-01 is not the key's: it was forged, or the key is another one"
    unsigned = (
        "position 1: no genuine signed head of 2026-03-01, which ends there, but one of 2026-03-03: "
        "it was removed from the heads, or forged"
    )
    assert problems() == [unsigned, f"position 1: {forgery}"]
    for removed in range(len(rest)):
        heads.unlink()
        append_heads(heads, [head for head in genuine if head is not genuine[removed]])
        assert len(problems()) == 1
        assert f"no genuine signed head of 2026-03-0{removed + 1}" in problems()[0]
    heads.unlink()
    append_heads(heads, genuine)
    log.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        guards = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("DELETE FROM log WHERE position = 3")
        for _, sql in guards:
            connection.execute(sql)
        connection.commit()
    assert "the log ends at position 2, before the signed head of 2026-03-03 at 3: its tail was cut off" in problems()
    log = EventLog(f"sqlite:///{path}")
    with pytest.raises(Corrupt, match="is not the head that was signed on 2026-03-03"):
        SignedHeads(settings, log, clock=lambda: NOON + timedelta(days=9)).sign()
    log.close()


@pytest.mark.parametrize("content", [b"", b"too short\n", None])
def test_a_key_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(InvalidInput, match="log_key_file"):
        read_key(tmp_path / "key")
