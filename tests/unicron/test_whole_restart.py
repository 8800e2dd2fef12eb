"""Scripts that restart whole: how their end is read, what their output says, and how their processes are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.condition import until_blocking
from unicron.protocol.messages import REFUSED
from unicron.whole_restart.megatron_output import Report, SavedStep, read_report, save_folder, saved_step
from unicron.whole_restart.script_ends import read_end
from unicron.whole_restart.script_process import ScriptProcess

TRACEBACK = """some output
[rank1]: Traceback (most recent call last):
[rank1]:   File "/train.py", line 14, in <module>
[rank1]:     loss.backward()
[rank1]: {}
later output
"""
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7320. This is typical"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was "
    "a network error, NCCL version 2.27\nncclRemoteError: A call failed possibly due to a network error"
)


@pytest.mark.parametrize(
    ("line", "kind", "error"),
    [
        ("ValueError: wrong", "exception", "ValueError"),
        ("KeyError", "exception", "KeyError"),
        ("my.package.TooHot: 90 degrees", "exception", "TooHot"),
        (GLOO, "communication", "RuntimeError"),
        (NCCL, "communication", "DistBackendError"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "exception", "RuntimeError"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "exception", "ConnectionResetError"),
    ],
)
def test_an_error_is_read_from_the_traceback(line: str, kind: str, error: str) -> None:
    end = read_end(1, TRACEBACK.format(line), first=False)
    assert end is not None
    assert (end.kind, end.error) == (kind, error)
    assert end.traceback.startswith("Traceback (most recent call last):\n  File")
    assert line.partition(": ")[2].partition("\n")[0] in end.detail


def test_the_last_error_counts() -> None:
    text = TRACEBACK.format("KeyError: 'a'") + "During handling of it\n" + TRACEBACK.format("ValueError: b")
    end = read_end(1, text, first=False)
    assert end is not None
    assert (end.error, end.detail.splitlines()[0]) == ("ValueError", "b")


@pytest.mark.parametrize("error", ["ModuleNotFoundError: No module named 'apex'", "SyntaxError: invalid syntax"])
def test_a_script_that_cannot_run_refuses_its_task_unless_it_has_made_a_step(error: str) -> None:
    text = TRACEBACK.format(error)
    first, later = read_end(1, text, first=True), read_end(1, text, first=False)
    assert first is not None
    assert later is not None
    assert (first.kind, later.kind) == (REFUSED, "exception")


def test_arguments_that_a_script_does_not_take_refuse_its_task() -> None:
    end = read_end(2, "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr\n", first=True)
    assert end is not None
    assert (end.kind, end.error) == (REFUSED, "SystemExit")
    assert end.detail == "exited with 2: train.py: error: unrecognized arguments: --lrr"
    other = read_end(3, "no room\n", first=True)
    assert other is not None
    assert (other.kind, other.detail) == ("exception", "exited with 3: no room")


def test_a_signal_says_nothing_about_the_script_but_nccls_watchdog_does() -> None:
    assert read_end(-signal.SIGKILL, TRACEBACK.format("ValueError: survived"), first=False) is None
    assert read_end(-signal.SIGABRT, "double free or corruption", first=False) is None
    watchdog = "[rank3]:[E1] [PG ID 0] Process group watchdog thread terminated with exception: collective timeout"
    end = read_end(-signal.SIGABRT, watchdog, first=False)
    assert end is not None
    assert end.kind == "communication"


def test_a_report_of_megatron_says_step_time_and_loss() -> None:
    line = (
        " [2026-01-02 03:04:05] iteration       10/     100 | consumed samples:          320 | elapsed time per "
        "iteration (ms): 1234.5 | learning rate: 1.0E-04 | global batch size:    32 | lm loss: 9.876543E+00 | loss"
    )
    assert read_report(line) == Report(10, 1.2345, 9.876543)
    assert read_report("iteration 3 of many") is None
    assert read_report(" validation loss at iteration 10 | lm loss value: 9.8E+00") is None


def test_the_tracker_names_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    arguments = ["--lr", "1", "--save", str(tmp_path)]
    assert save_folder(arguments) == save_folder([f"--save={tmp_path}"]) == str(tmp_path)
    assert save_folder(["--save-interval", "10"]) == ""
    assert saved_step("") is None
    assert saved_step(str(tmp_path)) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30\n")
    assert saved_step(str(tmp_path)) is None, "its folder is not there"
    (tmp_path / "iter_0000030").mkdir()
    assert saved_step(str(tmp_path)) == SavedStep(30, str(tmp_path / "iter_0000030"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert saved_step(str(tmp_path)) is None


RANK = """
import signal, sys, time
from unicron.whole_restart.script_process import ScriptProcess
lines = []
script = ScriptProcess([sys.executable, "-u", "-c", sys.argv[1]], {}, on_line=lines.append, on_end=lambda: None)
while not any("ready" in line for line in lines):
    time.sleep(0.01)
"""
CHILDREN = """
import signal, subprocess, sys, time
if {stubborn}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("ready", child.pid, flush=True)
time.sleep(100)
"""
"""A script with a process of its own, as a data loader's."""


def in_session(program: str, *arguments: str, stdin: int | None = None) -> psutil.Popen:
    """Start a program in a session of its own, as the fork server starts a rank."""
    return psutil.Popen([sys.executable, "-c", program, *arguments], stdin=stdin, start_new_session=True)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.timeout(60)
def test_a_script_is_ended_with_all_that_it_has_begun(stubborn: bool) -> None:
    program = RANK + "\nsys.stdin.readline()\nscript.end(0.5)"
    rank = in_session(program, CHILDREN.format(stubborn=stubborn), stdin=subprocess.PIPE)
    until_blocking(lambda: len(rank.children(recursive=True)) >= 2, "the script and its child run")
    begun = rank.children(recursive=True)
    rank.communicate(b"\n", timeout=30)
    assert rank.returncode == 0
    assert living(begun) == []


@pytest.mark.timeout(60)
def test_a_script_ends_with_its_rank() -> None:
    rank = in_session(RANK + "\ntime.sleep(100)", CHILDREN.format(stubborn=False))
    until_blocking(lambda: len(rank.children(recursive=True)) >= 2, "the script and its child run")
    (script,), begun = rank.children(), rank.children(recursive=True)
    rank.send_signal(signal.SIGKILL)
    rank.wait(30)
    until_blocking(lambda: not living([script]), "the script has ended")
    os.killpg(rank.pid, signal.SIGKILL)  # as the fork server does, which reaps the rank
    until_blocking(lambda: not living(begun), "all have ended")


@pytest.mark.timeout(60)
def test_its_output_is_copied_and_its_end_kept(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ended = threading.Event()
    lines: list[str] = []
    program = "import sys; print('x' * 200_000); print('last'); sys.exit(7)"
    script = ScriptProcess([sys.executable, "-c", program], dict(os.environ), on_line=lines.append, on_end=ended.set)
    assert ended.wait(30)
    assert script.code == 7
    assert lines[-1] == "last\n"
    assert "".join(lines) == "x" * 200_000 + "\nlast\n"
    assert script.tail.endswith("x\nlast\n")
    assert len(script.tail) == 64 * 1024
