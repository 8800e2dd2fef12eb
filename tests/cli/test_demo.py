"""What the demo does before it starts anything."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cli.demo.postmortem import shown, write_pages
from cli.demo.report import Check, Report, print_postmortems
from cli.demo.run import command, compare, demo_specs
from cli.demo.verb import fresh_directory
from cli.stack.run_directory import DEMO_MARKER, RunDirectory
from shared.errors import Conflict
from shared.tasks.specification import parse_spec
from tests.api.kit import Server


def test_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    run_dir = fresh_directory(tmp_path / "run")
    (run_dir / "tasks").mkdir()
    (run_dir / "log.db").touch()
    assert fresh_directory(tmp_path / "run") == run_dir
    assert {p.name for p in run_dir.iterdir()} == {DEMO_MARKER, "lock"}


def test_what_no_demo_made_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(Conflict, match="--run-dir"):
        fresh_directory(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_in_use_is_kept(tmp_path: Path) -> None:
    run_dir = fresh_directory(tmp_path / "run")
    (run_dir / "log.db").touch()
    with RunDirectory(run_dir), pytest.raises(Conflict, match="in use"):
        fresh_directory(run_dir)
    assert (run_dir / "log.db").exists()


def test_the_comparison_uses_the_folder(tmp_path: Path) -> None:
    with RunDirectory(tmp_path), pytest.raises(Conflict, match="in use"):
        asyncio.run(compare([], [], tmp_path))


def test_its_tasks_are_valid_and_differ_in_weight(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    specs = [parse_spec(spec) for spec in demo_specs(corpus, 7)]
    assert len({spec.name for spec in specs}) == len({spec.weight for spec in specs}) == 2
    assert {(spec.data, spec.seed) for spec in specs} == {(str(corpus), 7)}


def test_one_broken_promise_fails_it_all() -> None:
    report = Report()
    assert not report.ok  # nothing was checked
    report.checks.append(Check("a", True, ""))
    assert report.ok
    report.checks.append(Check("b", False, ""))
    assert not report.ok
    assert report.summary()["ok"] is False


async def test_the_page_of_each_incident_is_left_in_the_folder(
    healed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incidents = (await healed.http.get("/v1/incidents")).json()["items"]
    pages = await asyncio.to_thread(write_pages, healed.url, incidents, [], tmp_path)
    assert pages == [tmp_path / "postmortem" / "1-process-exit.html"]
    assert incidents[0]["id"] in pages[0].read_text()
    monkeypatch.chdir(tmp_path)
    lines = StringIO()
    report = Report(postmortems=pages)
    print_postmortems(report.postmortems, Console(file=lines, width=20))
    assert "\n  postmortem/1-process-exit.html\n" in lines.getvalue()
    assert report.summary()["postmortems"] == ["postmortem/1-process-exit.html"]
    monkeypatch.chdir("/usr")
    assert shown(pages[0]) == str(pages[0])


def test_a_command_to_copy_is_the_one_that_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/unicron", "demo"])
    assert command() == ".venv/bin/unicron"
    monkeypatch.setattr("sys.argv", ["/somewhere/cli/main.py", "demo"])
    assert command() == "unicron"
