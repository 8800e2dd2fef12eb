"""Gradients that are reduced beside the last backward pass: a fault at any moment of it costs no sample."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.test_snapshots import Nodes
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.environment import BUCKET_BYTES
from unicron.protocol import Finished

pytestmark = pytest.mark.timeout(180)

STEP = 3
TOLERANCE = 1e-6
"""Of parameters after a few steps; the order in which float32 numbers are added up differs."""
OVERLAP = {"parallel": {"distributed_optimizer": True, "overlap": True}, "exact": False}
DIVIDED = {"parallel": {"distributed_optimizer": True}, "exact": False}
STEADY = {"optimizer": {"eps": 1e-3}}
"""Where a gradient is zero but for rounding, Adam with its usual epsilon makes whole steps of the rounding."""
UNCLIPPED = {"optimizer": {"eps": 1e-3, "clip": 0.0}}
"""Megatron's norm for clipping is rounded in an order that depends on the buckets."""
COPIED_ONCE = {"checkpoint": {"every": 0, "memory_every": STEP - 1}}
SMALL_BUCKETS = {BUCKET_BYTES: "20000"}
"""The model has about 22,000 parameters."""


class SmallBuckets(Nodes):
    """Workers that reduce several bucket groups in a step."""

    async def fork_one(self, worker: str, node: str, fail_at: str = "") -> None:
        env = {"UNICRON_NODE": node, "UNICRON_DOMAIN": node, "UNICRON_MEMORY": str(self.folder(node))}
        faults = {"UNICRON_FAIL_AT": fail_at} if fail_at else {}
        await self.agent.fork(worker, self.spec, env | SMALL_BUCKETS | WRITES_AT_ONCE | faults)


async def train(a: Agent, spec: Path, workers: list[str]) -> Finished:
    a.messages.clear()
    await asyncio.gather(*(a.fork(worker, spec, SMALL_BUCKETS) for worker in workers))
    await a.configure(dict.fromkeys(workers, "initial"))
    return await a.finished(len(workers))


async def check_result(a: Agent, spec: Path, finished: Finished) -> None:
    reference = await reference_of(a, spec)
    assert finished.samples_sha256 == reference.samples_sha256
    assert largest_difference(finished.parameters_path, reference.parameters_path) <= TOLERANCE


async def test_without_a_fault_the_result_is_that_of_the_reduction_after_the_passes(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        after = await train(a, spec_file(**DIVIDED, **UNCLIPPED), ["w0", "w1"])
        beside = await train(a, spec_file(**OVERLAP, **UNCLIPPED), ["v0", "v1"])
        # Of two numbers the sum does not depend on their order.
        assert largest_difference(after.parameters_path, beside.parameters_path) == 0.0
        await check_result(a, spec_file(**UNCLIPPED, exact=False), beside)


@pytest.mark.parametrize("at", ["launch:0", "launch:2", "reduce", "update", "apply"])
async def test_survivors_keep_their_sums_until_the_update(
    at: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """Of three replicas one is lost with its node: its micro-batches alone are computed again."""
    spec = spec_file(**OVERLAP, **STEADY, **COPIED_ONCE)
    async with agent(tmp_path / "run") as a:
        nodes = SmallBuckets(a, spec, shared_memory, {"w0": "n0", "w1": "n1", "w2": "n2"})
        await nodes.train_to("w1", STEP, at, then="0:4:0:hang")
        survivors = ["w0", "w2"]
        await a.in_step(survivors, STEP, "update" if at in ("update", "apply") else "reduce")
        if at.startswith("launch"):
            assert (STEP, "reduce") not in a.phases("w1"), "sent after the backward pass"
        a.kill("w1")
        shutil.rmtree(nodes.folder("n1"))
        await a.hold(survivors)
        members = dict.fromkeys(survivors, "live")
        resumed = await a.resumed(await a.configure(members, stage="interrupted", complete=False, fault_step=STEP - 1))
        assert {(r.step, r.steps_recomputed) for r in resumed} == {(STEP, 0)}
        if at != "apply":  # who has applied an update of which a part is lost goes back to copies, and has no sums
            assert {r.computed for r in resumed} == {2}
        await a.stopped("w0")
        await a.drain(survivors)
        await nodes.fork_one("w3", "n3")
        await a.resumed(await a.configure({**members, "w3": "take"}))
        await check_result(a, spec_file(**STEADY, exact=False), await a.finished(3))
