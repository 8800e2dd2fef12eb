"""CUDA devices: communicators are aborted and made again, and state is copied through host memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from services.agent.machine import hardware
from services.agent.machine.hardware import VISIBLE_VARIABLE
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.contract_course import DP2, DP3, NCCL, PP, TP, Course, CourseFault, follow
from tests.unicron.harness import ON_ONE_DEVICE, Agent, agent
from unicron import device
from unicron.link import issuing
from unicron.protocol.messages import Finished, Progress, Raised, Resumed
from unicron.training.compute_time import ComputeTimer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
several = pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not ON_ONE_DEVICE, reason="there are not two CUDA devices (make test-gpu)"
)

TOLERANCE = 1e-5

COURSES = (
    Course(DP2, (CourseFault("2", "kill"),), NCCL),
    Course(TP, (CourseFault("reduce", "kill"),), NCCL),
    Course(DP2, (CourseFault("update", "kill"),), NCCL, sharded=True),
    Course(DP3, (CourseFault("2", "exception", (1, 2)),), NCCL),
    Course(PP, (CourseFault("2", "sleep"),), NCCL),
    Course(DP3, (CourseFault("2", "kill"), CourseFault("reduce", "sleep", (2,))), NCCL),
    Course(DP3, (CourseFault("reduce", "sleep"),), NCCL, sharded=True),
    Course(TP, (CourseFault("update", "exception"),), NCCL),
    Course(PP, (CourseFault("reduce", "kill"),), NCCL, returns=True),
    Course(DP2, (CourseFault("reduce", "exception"),), NCCL, returns=True),
    Course(PP, (CourseFault("update", "kill"),), NCCL),
    Course(TP, (CourseFault("2", "sleep"),), NCCL, returns=True),
    Course(TP, (CourseFault("2", "kill", (3,)),), NCCL, sharded=True),
    Course(DP3, (CourseFault("update", "sleep"), CourseFault("2", "kill", (2,))), NCCL),
)
"""The most telling first. Each point meets each kind and each layout."""


async def begin(
    a: Agent, spec: Path, workers: Sequence[str], env: dict[str, str], *, tensor: int = 1, pipeline: int = 1
) -> None:
    """Fork a worker for each device, and bring the workers into the first generation."""
    shown: list[dict[str, str]] = [{} for _ in workers]
    if not ON_ONE_DEVICE:
        found = hardware.of_node("n", workers, setting="", visible=os.environ.get(VISIBLE_VARIABLE))
        shown = [found.environment(worker) for worker in workers]
    await asyncio.gather(*(a.fork(w, spec, env | own) for w, own in zip(workers, shown, strict=True)))
    await a.configure(dict.fromkeys(workers, "initial"), tensor=tensor, pipeline=pipeline)


async def check_result(a: Agent, spec: Path, finished: Finished) -> None:
    """Compare with a failure-free run on one device."""
    a.messages.clear()
    await begin(a, spec, ["reference"], {})
    reference = await a.finished(1)
    assert finished.samples_sha256 == reference.samples_sha256
    assert largest_difference(finished.parameters_path, reference.parameters_path) <= TOLERANCE


@pytest.mark.parametrize("at", ["2", "reduce", "update"])
async def test_a_step_is_retried_in_place(at: str, tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(steps=8)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0"], {"UNICRON_FAIL_AT": f"0:3:{at}:communication"})
        await a.until(lambda: a.of(Raised))
        await a.hold(["w0"])
        (resumed,) = await a.resumed(await a.configure({"w0": "live"}, stage="interrupted"))
        assert (resumed.source, resumed.step, resumed.steps_recomputed) == ("own", 3, 0)
        await check_result(a, spec, await a.finished(1))


async def test_snapshots_of_device_memory_are_whole(tmp_path: Path, spec_file: SpecFile, shared_memory: Path) -> None:
    spec = spec_file(steps=10, checkpoint={"every": 0, "memory_every": 6})
    env = {"UNICRON_NODE": "n0", "UNICRON_DOMAIN": "n0", "UNICRON_MEMORY": str(shared_memory / "n0")}
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0"], {**env, "UNICRON_FAIL_AT": "0:9:1:kill"})
        await a.until(lambda: "w0" in a.exits)
        await a.fork("w1", spec, env)
        generation = await a.configure({"w1": "initial"}, fault_step=8)
        await a.resumed(generation)
        (resumed,) = a.of(Resumed, "w1", generation)
        assert (resumed.source, resumed.step, resumed.steps_recomputed) == ("memory", 7, 2)
        await check_result(a, spec, await a.finished(1))


def test_a_pinned_buffer_is_copied_to_without_the_processor() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert device.pin(memory)
    try:
        memory.copy_(torch.full((1 << 20,), 7, dtype=torch.uint8, device=device.current()), non_blocking=True)
        device.synchronize()
        assert bool((memory == 7).all())
    finally:
        device.unpin(memory)


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(tmp_path: Path) -> None:
    """A file on a disk, for instance. Torch looks for errors after each kernel, whoever has made them."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    memory = torch.from_file(str(path), shared=True, size=1 << 20, dtype=torch.uint8)
    if device.pin(memory):
        device.unpin(memory)
        pytest.skip("this file system's memory can be pinned")
    assert float(torch.ones(1, device=device.current()).sum()) == 1.0


class Busy:
    """A process group whose collectives keep the device's stream busy for about half a second."""

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> None:
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # cycles


def test_the_time_of_collectives_is_none_of_the_ranks_own() -> None:
    """They take nearly all of the step. The second step records the events of the first one again."""
    group, timer = Busy(), ComputeTimer()
    issuing.guard([group])
    values = torch.rand(2048, 2048, device=device.current())
    for step in (1, 2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        timer.begin(step, alone=False)
        for _ in range(2):
            values = torch.nn.functional.normalize(values @ values)
            group.allreduce([values])
        timer.end()
        ended.record()
        assert timer.result_s() is None
        device.synchronize()
        own_s = timer.result_s()
        assert own_s is not None
        assert 0.0 < own_s < began.elapsed_time(ended) / 1e3 / 2


@several
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
async def test_ranks_of_a_replica_report_their_own_compute_time(
    tensor: int, pipeline: int, tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        await begin(a, spec_file(steps=3), ["w0", "w1"], {}, tensor=tensor, pipeline=pipeline)
        await a.finished(2)
        for worker in ("w0", "w1"):
            ended = [m for m in a.of(Progress, worker) if m.phase == "ended"]
            assert ended
            for message in ended:
                assert message.compute_s is not None
                assert message.duration_s is not None
                assert 0.0 < message.compute_s < message.duration_s


@several
@pytest.mark.timeout(90)
@pytest.mark.parametrize("course", COURSES, ids=str)
async def test_survivors_finish_the_step(
    course: Course, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """The courses of the contract backend, on NCCL."""
    await follow(course, tmp_path, spec_file, shared_memory)


@several
@pytest.mark.parametrize("kind", ["kill", "sleep"])
@pytest.mark.parametrize("at", ["2", "reduce", "update"])
async def test_survivors_leave_a_collective_that_a_peer_never_enters(
    at: str, kind: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    """The survivor's kernel waits on the device until its communicator is aborted; its result is not used."""
    spec = spec_file(steps=8)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1"], {"UNICRON_FAIL_AT": f"1:3:{at}:{kind}"})
        await a.until(lambda: any(m.step == 3 and m.phase == "reduce" for m in a.of(Progress, "w0")))
        if kind == "kill":
            await a.until(lambda: "w1" in a.exits)
        await a.hold(["w0"])
        if kind == "sleep":
            a.kill("w1")
        (resumed,) = await a.resumed(await a.configure({"w0": "live"}, stage="interrupted"))
        assert resumed.steps_recomputed == 0
        await check_result(a, spec, await a.finished(1))
