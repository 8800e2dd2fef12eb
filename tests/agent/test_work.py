"""For how long a rank has been idle, by the processor time of its process, its children and its device."""

from __future__ import annotations

import subprocess
import sys

from services.agent.machine.proc import children_cpu_s, usage
from services.agent.node.process import Process
from tests.agent.test_node import configured, progress, receive
from tests.condition import until_blocking


def used(process: Process, course: list[tuple[float, float]], *, device_busy: bool = False) -> list[float | None]:
    """Return ``idle_s`` after each sample of (time, processor time)."""
    found = []
    for at_s, cpu_s in course:
        process.note_work(at_s, cpu_s, device_busy=device_busy)
        found.append(process.idle_s)
    return found


def test_time_in_which_a_process_uses_half_a_processor_or_more_is_no_idle_time() -> None:
    made, process = configured()
    receive(made, process, progress(1, "begun"), at_s=10.0)
    course = [(10.0, 5.0), (11.0, 6.0), (12.0, 6.5), (13.0, 6.9), (14.0, 6.9), (15.0, 7.9)]
    assert used(process, course) == [0.0, 0.0, 0.0, 1.0, 2.0, 2.0]
    status = made.status(at_s=15.0, process_states={}, schedules={})[1]
    assert (status.progress_age_s, status.idle_s) == (5.0, 2.0)


def test_progress_begins_the_idle_time_anew() -> None:
    made, process = configured()
    receive(made, process, progress(1, "begun"), at_s=10.0)
    assert used(process, [(10.0, 5.0), (12.0, 5.0)]) == [0.0, 2.0]
    receive(made, process, progress(1, "compute", micro_batch=0), at_s=12.5)
    assert used(process, [(13.0, 5.0), (14.0, 5.0)]) == [0.5, 1.5]


def test_a_device_that_computes_is_work() -> None:
    made, process = configured()
    receive(made, process, progress(1, "begun"), at_s=10.0)
    assert used(process, [(10.0, 5.0), (12.0, 5.0)], device_busy=True) == [0.0, 0.0]


def test_what_a_process_did_before_the_first_sample_counts_as_idle() -> None:
    made, process = configured()
    receive(made, process, progress(1, "begun"), at_s=10.0)
    assert used(process, [(13.0, 5.0), (14.0, 6.0)]) == [3.0, 3.0]


def test_the_steps_of_a_process_are_those_of_its_life() -> None:
    made, process = configured()
    for step in (1, 2):
        receive(made, process, progress(step, "ended", duration_s=0.1))
    receive(made, process, progress(2, "aside"))
    made.configure(process, generation=3, rank=0, at_s=3.0)
    receive(made, process, progress(3, "ended", generation=3, duration_s=0.1))
    status = made.status(at_s=4.0, process_states={}, schedules={})[1]
    assert (status.steps_timed, status.steps_done) == (1, 3)


def test_the_processor_time_of_all_threads_and_of_living_children_is_found() -> None:
    """A rank that compiles may wait for a compiler that it has started, from any of its threads."""
    spins = "while True: pass"
    script = (
        "import subprocess, sys, threading, time\n"
        f"start = lambda: subprocess.Popen([sys.executable, '-c', {spins!r}])\n"
        "children = []\n"
        "thread = threading.Thread(target=lambda: (children.append(start()), time.sleep(60)), daemon=True)\n"
        "thread.start()\n"
        "sys.stdin.read()\n"
        "[child.kill() for child in children]\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        until_blocking(lambda: children_cpu_s(process.pid) >= 0.3)
        own = usage(process.pid)
        assert own is not None
        assert own.state in "SRD"
    finally:
        process.stdin.close()
        process.wait(30)
    assert usage(process.pid) is None
    assert children_cpu_s(process.pid) == 0.0
