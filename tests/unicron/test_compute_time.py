"""The rank's own compute time: what it leaves out, and that ranks report it with each step's end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from unicron.protocol.messages import Progress
from unicron.training import compute_time
from unicron.training.compute_time import ComputeTimer, run_queue_wait_s


class Clocks:
    """The clocks that the timer reads, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.ran_s = self.starved_s = 0.0
        monkeypatch.setattr("unicron.training.compute_time.time.perf_counter", lambda: self.wall_s)
        monkeypatch.setattr("unicron.training.compute_time.time.thread_time", lambda: self.ran_s)
        monkeypatch.setattr(compute_time, "run_queue_wait_s", lambda: self.starved_s)

    def pass_by(self, *, ran_s: float = 0.0, starved_s: float = 0.0, slept_s: float = 0.0) -> None:
        self.wall_s += ran_s + starved_s + slept_s
        self.ran_s += ran_s
        self.starved_s += starved_s


@pytest.mark.parametrize(
    ("alone", "waited_s", "expected_s"),
    [(True, 0.0, 3.0), (True, 0.5, 2.5), (True, 9.0, 1.0), (False, 0.0, 1.0)],
    ids=["own sleep counts", "waits for peers do not", "never below the CPU time", "in a replica of several"],
)
def test_what_counts(monkeypatch: pytest.MonkeyPatch, *, alone: bool, waited_s: float, expected_s: float) -> None:
    """In each step the thread runs for a second, sleeps for two, and lacks a CPU for four."""
    monkeypatch.setattr("unicron.training.compute_time.device.is_cuda", lambda: False)
    clocks, timer = Clocks(monkeypatch), ComputeTimer()
    for _ in range(2):
        clocks.pass_by(ran_s=10.0, slept_s=10.0)  # what is between two steps does not count
        timer.begin(alone=alone)
        assert timer.result_s() is None
        clocks.pass_by(ran_s=1.0, slept_s=2.0, starved_s=4.0)
        timer.end(waited_s)
        clocks.pass_by(ran_s=10.0)
        assert timer.result_s() == pytest.approx(expected_s)


def test_the_kernel_counts_waits_of_the_thread_that_asks() -> None:
    before_s = run_queue_wait_s()
    time.sleep(0.001)
    assert run_queue_wait_s() >= before_s >= 0.0


async def test_ranks_report_their_own_compute_time(tmp_path: Path, spec_file: SpecFile) -> None:
    """Two replicas share 12 micro-batches evenly; of a replica of two ranks each computes all of them."""
    async with agent(tmp_path / "run") as a:
        spec = spec_file(steps=3)
        for worker in ("w0", "w1"):
            await a.fork(worker, spec)
        await a.configure({"w0": "initial", "w1": "initial"})
        await a.finished(2)
        for worker in ("w0", "w1"):
            ended = {m.step: m for m in a.of(Progress, worker) if m.phase == "ended"}
            assert ended
            for message in ended.values():
                assert message.micro_batches == 6
                assert message.compute_s is not None
                assert message.duration_s is not None
                assert 0.0 < message.compute_s <= message.duration_s
