"""What the kernel reports about processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.agent.machine.proc import Scheduled, handles, process_state, scheduled, starved_s
from tests.condition import until_blocking


@pytest.fixture
def spinning() -> Iterator[int]:
    """A process that computes for ever."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process.pid
    process.kill()
    process.wait()


def test_a_process_that_computes_runs_or_waits_for_a_cpu(spinning: int) -> None:
    before, start_s = scheduled(spinning), time.monotonic()
    assert before is not None

    def has_run() -> Scheduled | None:
        now = scheduled(spinning)
        return now if now is not None and now.ran_s >= before.ran_s + 0.1 else None

    now = until_blocking(has_run)
    elapsed_s = time.monotonic() - start_s
    assert process_state(spinning) == "R"
    assert 0.0 <= starved_s(before, now, elapsed_s, "R") <= elapsed_s - 0.1 + 0.01


def test_a_stopped_process_neither_runs_nor_waits(spinning: int) -> None:
    os.kill(spinning, signal.SIGSTOP)
    until_blocking(lambda: process_state(spinning) == "T")
    before = scheduled(spinning)
    time.sleep(0.1)
    assert scheduled(spinning) == before
    assert starved_s(before, scheduled(spinning), 0.1, "T") == 0.0


def test_a_name_cut_in_the_middle_of_a_character_hides_no_state() -> None:
    comm = Path("/proc/self/task") / str(threading.get_native_id()) / "comm"
    before = comm.read_bytes()
    try:
        comm.write_bytes("training ééé".encode()[:-1])
        assert process_state(threading.get_native_id()) == "R"
    finally:
        comm.write_bytes(before.strip())


@pytest.mark.parametrize(("state", "starved"), [("S", 0.25), ("R", 0.75)])
def test_only_what_it_ran_is_certain_of_one_that_is_ready(state: str, starved: float) -> None:
    assert starved_s(Scheduled(1.0, 2.0), Scheduled(1.25, 2.25), 1.0, state) == starved


def test_a_process_that_is_gone_has_no_schedule() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert scheduled(process.pid) is None
    assert starved_s(None, None, 5.0, None) == 0.0


def test_the_signals_that_a_process_handles_are_known() -> None:
    pid, before = os.getpid(), signal.getsignal(signal.SIGUSR2)
    try:
        signal.signal(signal.SIGUSR2, lambda number, frame: None)
        assert handles(pid, signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert not handles(pid, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not handles(1 << 30, signal.SIGUSR2)
