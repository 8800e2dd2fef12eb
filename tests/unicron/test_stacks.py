"""A process is asked for the stacks of its threads, and lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unicron.link import stacks

pytestmark = pytest.mark.timeout(60)

BUSY = r"""
import json, sys, threading
from unicron.process.processes import write_stacks

def busy():
    def below(n):
        return below(n - 1) if n else json.loads(json.dumps({"a": [1, 2, 3]}))
    while True:
        exec(compile("def made(x):\n return below(x)\nmade(5)", "made", "exec"), {"below": below})

write_stacks(sys.argv[1])
threading.Thread(target=busy, daemon=True).start()
held = threading.Lock()
held.acquire()
print("ready", flush=True)
held.acquire()
"""

BETWEEN_S = 0.0005
"""From one request to the next. Chosen: the handler takes less, and a signal that is pending is not sent again."""

REQUESTS = 2000
"""Where the handler reads other threads, the process has ended after 40 to 900 of them."""


def test_requests_by_signal_do_not_end_a_process_of_which_another_thread_runs(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    with subprocess.Popen([sys.executable, "-c", BUSY, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in range(REQUESTS):
            assert process.poll() is None, f"it has ended with {process.returncode} after {number} requests"
            os.kill(process.pid, signal.SIGUSR2)
            time.sleep(BETWEEN_S)
        process.kill()
    assert '"<string>", line 16 in <module>' in path.read_text()


def test_the_main_thread_comes_first_and_the_one_that_asks_is_left_out() -> None:
    found: list[str] = []
    waiting, asked = threading.Event(), threading.Event()

    def wait_here() -> None:
        waiting.set()
        asked.wait(30)

    def ask_here() -> None:
        found.append(stacks.of_other_threads())

    other = threading.Thread(target=wait_here)
    other.start()
    assert waiting.wait(30)
    asking = threading.Thread(target=ask_here)
    asking.start()
    asking.join()
    asked.set()
    other.join()
    first, *others = found[0].split("\n\n")
    assert first.startswith(f"Current thread 0x{threading.main_thread().ident:016x} (most recent call first):\n")
    assert "in test_the_main_thread_comes_first" in first
    assert any("in wait_here" in block and block.startswith("Thread 0x") for block in others)
    assert "ask_here" not in found[0]


def test_long_stacks_are_cut() -> None:
    found: list[str] = []

    def deep(calls: int) -> None:
        if calls:
            deep(calls - 1)
        else:
            asking = threading.Thread(target=lambda: found.append(stacks.of_other_threads()))
            asking.start()
            asking.join()

    deep(300)
    assert len(found[0]) == stacks.MOST_CHARACTERS
