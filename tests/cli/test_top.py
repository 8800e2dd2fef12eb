"""``unicron top``: frames of every size, and the live screen in a real terminal.

``UNICRON_TEST_RECORD=1`` writes the golden frames anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.glance.top_frame import frame
from cli.glance.top_look import Look
from tests.api.kit import Server
from tests.cli.conftest import call_unicron

GOLDEN = Path(__file__).parent / "golden"


def task(name: str, state: str, step: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "step": step,
        "steps": 2000,
        "step_s": 1.5 if state == "running" else None,
        "loss": 2.125 if step else None,
        "throughput_flop_per_s": 3.2e15 if state == "running" else 0.0,
        "waf_flop_per_s": 6.4e15 if state == "running" else 0.0,
        "workers": 8 if state == "running" else 0,
        "reason": "",
        "slow_workers": {},
        "anomalies": [],
        **changes,
    }


def node(name: str, state: str, *tasks: str | None) -> dict[str, Any]:
    workers = [{"worker": f"{name}/{slot}", "task": task} for slot, task in enumerate(tasks)]
    return {"name": name, "state": state, "recorded_state": state, "workers": workers}


def incident(number: int) -> dict[str, Any]:
    return {
        "id": f"{number:08d}-5ab2-5e43-8d3c-0f3b62c3e1aa",
        "occurred_at": "2026-03-01T12:59:30.000000Z",
        "kind": "node-lost",
        "severity": "SEV1",
        "worker": None,
        "node": "n2",
        "response": "reconfigure",
        "tasks": ["gpt-large"],
        "failed_tasks": {},
        "attempts": [{"generation": one} for one in range(number + 1)],
        "closed_at": None,
        "restored_at": None,
        "usual_s": 4.25 if number else None,
        "stuck_s": 25.75 if number else None,
    }


def part(name: str, *, lag: int | None = None, detail: str = "", ok: bool = True) -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": detail, "lag": lag, "counters": {}}


def plan(number: int) -> dict[str, Any]:
    return {
        "id": f"{number:08d}-77ab-5e43-8d3c-0f3b62c3e1aa",
        "decided_at": "2026-03-01T09:59:30.000000Z",
        "trigger": "error",
        "response": "reconfigure",
        "state": "done",
        "incident": incident(number)["id"],
        "tasks": ["gpt-large", "gpt-small"],
    }


def seen(tasks: int = 1, incidents: int = 1, plans: int = 2) -> Look:
    going_on = [task(f"gpt-{number}", "running", 500) for number in range(tasks)]
    wait = "needs at least 2 workers; other tasks come first for the 1 there is"
    return Look(
        server="http://127.0.0.1:8642",
        nodes=[node("n0", "ready", "gpt-0", None), node("n1", "drained", None, None), node("n2", "lost", None, None)],
        tasks=[*going_on, task("waits", "queued", reason=wait), task("old", "failed", 7, reason="an \x1b[31merror")],
        incidents=[incident(number) for number in range(incidents)],
        plans=[plan(number) for number in range(plans)],
        waf={
            "window_end": "2026-03-01T13:00:00.000000Z",
            "waf_flop_per_s": [0.0] * 60 + [8e15] * 200 + [4e15] * 100,
            "healthy_flop_per_s": [8e15] * 360,
        },
        status={"ready": True, "checks": [part("log", detail="position 9"), part("detector", lag=0)]},
    )


@pytest.mark.parametrize("columns", [80, 200])
def test_a_frame_is_as_it_was(columns: int) -> None:
    text = "".join(f"{line.plain.rstrip()}\n" for line in frame(seen(), columns, 24))
    golden = GOLDEN / f"top-{columns}.txt"
    if os.environ.get("UNICRON_TEST_RECORD"):
        golden.write_text(text)
    assert text == golden.read_text()


@given(st.integers(20, 200), st.integers(1, 60), st.integers(0, 40), st.integers(0, 20), st.integers(0, 20))
def test_a_frame_fits_any_terminal(columns: int, lines: int, tasks: int, incidents: int, plans: int) -> None:
    look = seen(tasks, incidents, plans)
    shown = [line.plain for line in frame(look, columns, lines)]
    assert len(shown) <= lines
    assert [line for line in shown if len(line) > columns] == []
    assert all(line.isprintable() for line in shown)
    if lines >= 7:
        assert any(line.startswith("TASK") for line in shown)
    whole = [line.plain for line in frame(look, columns, None)]
    assert sum(line.startswith("gpt-") for line in whole) == tasks
    if len(whole) <= lines:
        assert shown == whole


def test_what_is_wrong_with_the_connection_is_in_the_first_line() -> None:
    assert frame(seen(), 80, 24, "no answer for 3 s: it is away")[0].plain == "no answer for 3 s: it is away"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part("detector", lag=0)], "control plane: all parts work; none is behind the log"),
        (
            [part("transition", ok=False, detail="no answer within 1 s"), part("planner", lag=312)],
            "control plane: does not work: transition (no answer within 1 s); behind the log by events: planner 312",
        ),
    ],
)
def test_the_head_says_how_the_control_plane_is(parts: list[dict[str, Any]], said: str) -> None:
    look = replace(seen(), status={"ready": all(one["ok"] for one in parts), "checks": parts})
    assert frame(look, 200, 24)[1].plain == said


async def test_one_frame_is_printed_where_the_output_is_no_terminal(healed: Server) -> None:
    shown = await call_unicron("top", server=healed.url)
    assert (shown.code, shown.err) == (0, "")
    head, *rest = shown.out.splitlines()
    assert head.startswith(f"unicron {healed.url}")
    # No other service runs beside this server.
    assert rest[0].startswith("control plane: does not work: detector (")
    assert rest[1] == "nodes 2: 2 ready  workers 4: 4 in use, 0 idle, 0 lost"
    assert [line.split()[:5] for line in rest if line.startswith("gpt")] == [["gpt", "running", "95/100", "5s", "2.5"]]
    assert [line.split()[0] for line in rest[-2:]] == ["p1", "start"]
    as_json = await call_unicron("top", "-o", "json", server=healed.url)
    assert set(json.loads(as_json.out)) == {"server", "nodes", "tasks", "incidents", "plans", "waf", "status"}


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["q", "ctrl-c"])
async def test_the_live_screen_ends_with_a_key_and_leaves_the_terminal_as_it_was(healed: Server, ends: str) -> None:
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", "top", "--server", healed.url,
        stdin=terminal, stdout=terminal, stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    os.close(terminal)
    try:
        screen = await asyncio.to_thread(read_until, master, b"TRIGGER")
        assert b"gpt" in screen
        if ends == "q":
            os.write(master, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        rest = asyncio.create_task(asyncio.to_thread(read_until, master, b"\x1b[?1049l"))  # back from the other screen
        assert await asyncio.wait_for(process.wait(), 50) == 0
        await rest
        assert process.stderr is not None
        assert await process.stderr.read() == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(master)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    """Return what a terminal shows, up to a text."""
    found = b""
    while wanted not in found:
        found += os.read(descriptor, 65536)
    return found
