"""Progress bars and remaining times."""

from __future__ import annotations

import io
import os
import pty
import sys
import time
from contextlib import redirect_stderr

import pytest

from cli import progress
from cli.progress import duration, remaining_s, words


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (61, "1m01s"), (7384, "2h03m"), (273_600, "3d04h"), (-5.0, "0s")],
)
def test_times_have_two_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_the_remaining_time_is_that_of_the_steps_left_while_the_task_trains() -> None:
    task = {"name": "gpt", "state": "running", "step": 10, "steps": 100, "step_s": 2.0}
    assert remaining_s(task) == 180.0
    assert words(task) == "gpt: running, step 10/100, 3m00s left"
    for changes in ({"state": "queued"}, {"state": "transitioning"}, {"step_s": None}):
        assert remaining_s({**task, **changes}) is None
    assert words({**task, "state": "queued"}) == "gpt: queued, step 10/100"


def test_nothing_is_shown_where_standard_error_is_no_terminal() -> None:
    shown = io.StringIO()
    with redirect_stderr(shown), progress.counted("rows", 3) as count:
        assert list(count("abc")) == ["a", "b", "c"]
    assert shown.getvalue() == ""


@pytest.mark.parametrize("late", [False, True])
def test_a_bar_appears_on_a_terminal_after_a_while_only(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "AFTER_S", 0.0 if late else 3600.0)
    master, terminal = pty.openpty()
    os.set_blocking(master, False)
    shown = b""
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress.number_bar("events replayed") as seen:
            deadline_s = time.monotonic() + 40
            while late and b"77 events replayed" not in shown and time.monotonic() < deadline_s:
                seen(77)
                shown += available(master)
        monkeypatch.undo()
    shown += available(master)
    os.close(master)
    assert (b"77 events replayed" in shown) is late
    assert late or shown == b""


def available(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except (BlockingIOError, OSError):
        return b""
