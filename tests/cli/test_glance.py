"""What an operator sees first: whether anything needs somebody, the newest incidents, a post-mortem in a terminal."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

import pytest

from cli.glance import status
from cli.output import print_markdown
from shared.events.severities import ErrorKind, Method, Severity
from shared.events.union import ErrorDetected, TaskFailed
from shared.model import utc_now
from tests.api.kit import Server
from tests.cli.conftest import call_unicron


async def fault(api: Server, incident: str, task: str | None = None) -> None:
    await api.append(
        ErrorDetected,
        incident=incident,
        kind=ErrorKind.EXCEPTION,
        severity=Severity.SEV2,
        method=Method.EXCEPTION,
        detected_at=utc_now(),
        task=task,
    )


async def test_the_status_of_a_cluster_fits_ten_lines_and_says_whatneeds_somebody(healed: Server) -> None:
    """Nothing answers for detector, planner and transition here; whether tasks need somebody is said apart from it."""
    before = json.loads((await call_unicron("status", "-o", "json", server=healed.url)).out)
    seen = {name: before[name] for name in ("open_incidents", "tasks", "failed_tasks", "waiting_tasks")}
    assert seen == {"open_incidents": [], "tasks": {"running": 1}, "failed_tasks": [], "waiting_tasks": []}
    assert not status.needs_somebody(seen)
    assert before["needs_somebody"]
    for number in range(9):
        await fault(healed, f"open-{number}", "gpt")
    await healed.append(TaskFailed, task="gpt", generation=3, step=3, reason="it is wrong", incident="open-0")
    shown = await call_unicron("status", server=healed.url)
    lines = shown.out.splitlines()
    assert shown.code == 1
    assert len(lines) <= 10
    assert lines[0].startswith("control plane: does not work: detector")
    assert lines[1:4] == [
        "nodes: 2 ready",
        "tasks: none goes on",
        "failed within a day: gpt (unicron show TASK says why)",
    ]
    assert lines[4].startswith("open incidents: ")
    assert lines[-1] == "  more of them: unicron incidents --state open"
    after = json.loads((await call_unicron("status", "-o", "json", server=healed.url)).out)
    assert status.needs_somebody({**seen, "failed_tasks": after["failed_tasks"]})
    stuck = {**after["open_incidents"][0], "stuck_s": 40.0, "usual_s": 1.0}
    assert status.needs_somebody({**seen, "open_incidents": [stuck]})
    assert status.needs_somebody({**seen, "waiting_tasks": ["gpt"]})


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
