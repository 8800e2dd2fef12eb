"""What an operator sees first: whether anything needs somebody, the newest incidents, a post-mortem in a terminal."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

import pytest

from cli.output import print_markdown
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskFailed
from shared.model import utc_now
from tests.api.kit import Server
from tests.cli.conftest import call_unicron


async def fault(api: Server, incident: str, task: str | None = None) -> None:
    recorded = await api.append(
        ErrorDetected,
        incident=incident,
        kind=ErrorKind.EXCEPTION,
        severity=Severity.SEV2,
        method=Method.EXCEPTION,
        detected_at=utc_now(),
        task=task,
    )
    await api.projected(recorded.position)


async def test_the_status_of_a_cluster_fits_ten_lines_and_says_what_needs_somebody(healed: Server) -> None:
    """Nothing answers for detector, planner and transition here; whether tasks need somebody is said apart from it."""
    before = await call_unicron("status", server=healed.url)
    assert before.code == 1
    assert before.out.startswith("control plane: does not work: detector")
    assert before.out.splitlines()[0].endswith("; nobody is on it: control-plane")
    assert before.out.splitlines()[1].startswith("  to do: Start detector, planner, transition again")
    assert before.out.splitlines()[2:] == ["nodes: 2 ready", "tasks: 1 running", "no other trouble"]
    for number in range(9):
        await fault(healed, f"open-{number}", "gpt")
    ended = {"task": "gpt", "generation": 3, "step": 3, "incident": "open-0"}
    recorded = await healed.append(TaskFailed, reason="it is wrong", **ended)
    await healed.projected(recorded.position)
    shown = await call_unicron("status", server=healed.url)
    lines = shown.out.splitlines()
    assert shown.code == 1
    assert len(lines) <= 10
    assert lines[2:4] == ["nodes: 2 ready", "tasks: none goes on"]
    (failed,) = [place for place, line in enumerate(lines) if line.startswith("gpt failed: it is wrong (failed since")]
    assert "unicron resume gpt" in lines[failed + 1]
    assert "nobody is on it: task-failed" not in shown.out  # it has an incident
    taken = await call_unicron("incidents", "acknowledge", "control-plane", server=healed.url)
    assert (taken.code, taken.out.partition("/")[0]) == (0, "acknowledged by uid")
    as_json = json.loads((await call_unicron("status", "-o", "json", server=healed.url)).out)
    assert {one["kind"]: one["needs_somebody"] for one in as_json["items"]} == {
        "control-plane": True,
        "incident": False,
        "task-failed": True,
    }


async def test_the_newest_incidents_come_first_and_fit_a_terminal(
    healed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(25):
        await fault(healed, f"later-{number:02}")

    async def ids(*options: str) -> list[str]:
        listed = json.loads((await call_unicron("incidents", *options, "-o", "json", server=healed.url)).out)
        return [one["id"] for one in listed["items"]]

    newest = [f"later-{number:02}" for number in range(24, -1, -1)]
    assert await ids() == newest[:20]
    assert await ids("--last", "3") == newest[:3]
    assert await ids("--all") == [*newest, "i1"]
    assert (await call_unicron("incidents", "--all", "--last", "3", server=healed.url)).code == 2
    monkeypatch.setenv("UNICRON_COLUMNS", "80")
    text = (await call_unicron("incidents", "--all", server=healed.url)).out
    assert {"STATE", "RESUME", "RESTORE"} <= set(text.splitlines()[0].split())
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("left out"))
    assert (await call_unicron("incidents", server=healed.url)).out.endswith("the newest 20 (--all has all)\n")


def test_a_page_is_laid_out_without_what_a_terminal_would_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_COLUMNS", "60")
    shown = io.StringIO()
    with redirect_stdout(shown):
        print_markdown("# It failed\n\n| phase | s |\n|---|---|\n| detect | 0.5 |\n\nlast output: \x1b[2J`x`\n")
    assert "\x1b[2J" not in shown.getvalue()
    assert "|---" not in shown.getvalue()
    assert "detect" in shown.getvalue()
