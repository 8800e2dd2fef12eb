"""The rank's own compute time: what it leaves out, on which clock, and that ranks report it with each step's end."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unicron.conftest import SpecFile
from tests.unicron.contract.ranks import End, Rank, run
from tests.unicron.harness import agent
from tests.unicron.test_one_rank import QUICK
from unicron.link import issuing
from unicron.megatron import cpu
from unicron.process.run_queue import run_queue_wait_s
from unicron.protocol.messages import Progress
from unicron.training import compute_time
from unicron.training.compute_time import ComputeTimer


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
    for step in (1, 2):
        clocks.pass_by(ran_s=10.0, slept_s=10.0)  # what is between two steps does not count
        timer.begin(step, alone=alone)
        assert timer.result_s() is None
        clocks.pass_by(ran_s=1.0, slept_s=2.0, starved_s=4.0)
        timer.end(waited_s)
        clocks.pass_by(ran_s=10.0)
        assert timer.result_s() == pytest.approx(expected_s)


class Device:
    """A stream whose clock the test sets, and the host's clock, which each moment advances by its cost."""

    def __init__(self, moment_s: float = 0.0) -> None:
        self.at_s = self.host_s = self.passed_s = 0.0
        self.moment_s = moment_s
        self.noted = 0

    def timer(self) -> ComputeTimer:
        return ComputeTimer(self, lambda: self.host_s)

    def moment(self) -> float:
        self.host_s += self.moment_s
        self.noted += 1
        return self.at_s

    def passed(self, moment: float) -> bool:
        return moment <= self.passed_s

    def between_s(self, begin: float, end: float) -> float:
        return end - begin

    def reuse(self) -> None:
        self.passed_s = self.at_s


class Group:
    """A process group on a device: its collectives take as long as the test says, in which the stream waits."""

    def __init__(self, device: Device) -> None:
        self.device, self.takes_s = device, 0.0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[object], options: dist.AllreduceOptions) -> dist.Work | None:
        if options.asyncOp:
            return Waiting(self)
        self.device.at_s += self.takes_s
        return None


class Waiting(dist.Work):
    """A collective beside which the stream goes on until it is waited for."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.device.at_s += self._group.takes_s
        return True


def all_reduce(group: Group, *, asynchronous: bool = False) -> dist.Work | None:
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    return group.allreduce([], options)


def test_on_a_device_what_lies_between_collectives_counts() -> None:
    """Also beside a collective until it is waited for; nothing that comes before or behind the passes does."""
    stream = Device()
    group, timer = Group(stream), stream.timer()
    issuing.guard([group])
    for alone in (True, False):
        for took_s in (8.0, 128.0):
            group.takes_s = took_s
            all_reduce(group)
            timer.begin(1, alone=alone)
            stream.at_s += 1.0
            all_reduce(group)
            stream.at_s += 2.0
            work = all_reduce(group, asynchronous=True)
            assert work is not None
            stream.at_s += 4.0
            work.wait()
            timer.end()
            all_reduce(group)
            assert timer.result_s() is None, "the stream has not come to the end of the passes"
            stream.passed_s = stream.at_s
            assert timer.result_s() == 7.0
    assert stream.noted == 4 * 6


def test_a_step_that_is_left_is_measured_no_further() -> None:
    stream = Device()
    group, timer = Group(stream), stream.timer()
    issuing.guard([group])
    timer.begin(1, alone=False)
    timer.stop()
    noted = stream.noted
    all_reduce(group)
    assert (stream.noted, timer.result_s()) == (noted, None)


@pytest.mark.parametrize(
    ("moment_s", "every"), [(1e-6, 1), (0.9e-4, 1), (2.1e-4, 2), (1e-2, 64)], ids=["cheap", "just", "dear", "worse"]
)
def test_measuring_takes_at_most_two_thousandths_of_the_time(moment_s: float, every: int) -> None:
    """Each step has 12 moments and lasts for a second: 12 moments of 0.17 ms would be 2 ms."""
    stream = Device(moment_s)
    group, timer = Group(stream), stream.timer()
    issuing.guard([group])
    measured = []
    for step in range(1, 4 * every + 9):
        timer.begin(step, alone=False)
        for _ in range(5):
            all_reduce(group)
        timer.end()
        stream.host_s += 1.0
        stream.passed_s = stream.at_s
        if timer.result_s() is not None:
            measured.append(step)
    assert measured[:2] == [1, 2], "the first one makes what the others use, so the second one says what it costs"
    assert [b - a for a, b in itertools.pairwise(measured[-4:])] == [every] * 3


def two_ranks(rank: Rank) -> None:
    """Count the moments of each call; what waits for a peer has one before and one behind it."""
    cpu.enable()
    from megatron.core.tensor_parallel import mappings

    group = dist.group.WORLD
    issuing.guard([group])
    stream = Device()
    timer = stream.timer()
    timer.begin(1, alone=False)
    shard = torch.ones(1, 2, requires_grad=True)
    noted = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
        lambda: mappings.reduce_from_tensor_model_parallel_region(torch.ones(1), group),
        lambda: mappings.gather_from_sequence_parallel_region(shard, group=group).sum().backward(),
        lambda: [work.wait() for work in dist.batch_isend_irecv(exchange(rank))],
    ):
        before = stream.noted
        call()
        noted.append(stream.noted - before)
    timer.end()
    # An asynchronous call waits in ``wait`` alone. Torch waits for a synchronous one of this backend, which returns a
    # work, once more. The backward pass of a gather is a reduce-scatter.
    assert noted[:3] == [2, 4, 8]
    assert noted[3] >= 2, "pipelines wait for a batch of sends and receives"


def exchange(rank: Rank) -> list[dist.P2POp]:
    peer = 1 - rank.number
    return [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, torch.empty(1), peer)]


def test_the_calls_of_torch_and_megatron_come_by(tmp_path: Path) -> None:
    """On the contract backend, whose groups are guarded as those of NCCL are."""
    assert run(two_ranks, 2, tmp_path, QUICK) == [End(0, "")] * 2


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
