"""Where verbs look without ``--server``: at what runs in ``.unicron`` of the folder, and never at a stale file."""

from __future__ import annotations

import asyncio
import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from cli import here
from cli.main import main
from cli.stack.run_directory import RunDirectory
from tests.api.kit import Server
from tests.cli.conftest import NOWHERE, Outcome


async def call(*arguments: str) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = await asyncio.to_thread(main, [*arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


async def test_verbs_find_what_runs_in_the_folder_and_say_how_to_look_at_what_has_ended(
    api: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNICRON_SERVER", raising=False)
    for module in ("cli.main", "unicron_client.transport"):
        monkeypatch.setattr(f"{module}.DEFAULT_SERVER", NOWHERE)
    port = tmp_path / ".unicron" / here.PORT
    with RunDirectory(here.DEFAULT_RUN_DIR):
        port.write_text(f"{api.url.rpartition(':')[2]}\n")
        found = await call("nodes", "-o", "json")
        assert (found.code, found.err) == (0, "")
        assert "[]" in found.out
    without_log = await call("nodes")
    (tmp_path / ".unicron" / "log.db").touch()
    ended = await call("nodes")
    assert (without_log.code, ended.code) == (5, 5)
    assert ended.err.strip() == (
        without_log.err.strip()
        + "; .unicron has the log of a run that has ended: `unicron up --nodes 0` in this folder shows it"
    )
    with RunDirectory(here.DEFAULT_RUN_DIR):
        assert here.address() is None, "the port is that of an earlier stack"
        assert here.advice() == ""
