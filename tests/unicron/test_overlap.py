"""Gradients that are reduced beside the last backward pass: a fault at any moment of it costs no sample."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity.courses import TaskLayout
from tests.unicron.conftest import MODEL, SpecFile, largest_difference
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.test_loss_scale import ALL_AT_ONCE, FIELDS, example
from tests.unicron.test_snapshots import Nodes
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.megatron.schedule import LossScale
from unicron.protocol.environment import BUCKET_BYTES
from unicron.protocol.messages import Checkpointed, Finished, Held, Raised
from unicron.training.step import Step

pytestmark = pytest.mark.timeout(180)

STEP = 3
TOLERANCE = 1e-6
"""Of parameters after a few steps; the order in which float32 numbers are added up differs."""
OVERLAP = {"parallel": {"distributed_optimizer": True, "overlap": True}, "exact": False}
DIVIDED = {"parallel": {"distributed_optimizer": True}, "exact": False}
STEADY = {"optimizer": {"eps": 1e-3}}
"""Where a gradient is zero but for rounding, Adam with its usual epsilon makes whole steps of the rounding."""
DETERMINISTIC = {"deterministic_sums": True}
UNCLIPPED = {"optimizer": {"eps": 1e-3, "clip": 0.0}}
"""Megatron's norm for clipping is rounded in an order that depends on the buckets."""
COPIED_ONCE = {"checkpoint": {"every": 0, "memory_every": STEP - 1}}
SMALL_BUCKETS = {BUCKET_BYTES: "20000"}
"""The model has about 22,000 parameters."""


CLIPPED = [
    ('optimizer="sgd", lr=0.1, clip_grad=0.0', 'optimizer="adam", adam_eps=1e-3, lr=2e-3, clip_grad=0.0'),
    ("        step.reduce()", "        step.reduce()\n        assert step.clip_gradients(0.1) > 0.1"),
]
STOCK_OVERLAP = [
    (
        "grad_reduce_in_fp32=True, overlap_grad_reduce=False",
        "overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, bucket_size=20_000",
    ),
    ('optimizer="adam", ', 'optimizer="adam", use_distributed_optimizer=True, overlap_param_gather=True, '),
    (
        "        step.reduce()",
        "        launched = run._training.rank_state.overlap._launched\n"
        "        assert launched == (0 if step.number == 1 else len(run.model.bucket_groups)) != 1\n"
        "        step.reduce()",
    ),
    (
        "    return model, optimizer",
        "    config.no_sync_func, config.param_sync_func = model.no_sync, model.start_param_sync\n"
        "    return model, optimizer",
    ),
]


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


async def check_result(a: Agent, spec: Path, finished: Finished, tolerance: float = TOLERANCE) -> None:
    reference = await reference_of(a, spec)
    assert finished.samples_sha256 == reference.samples_sha256
    assert largest_difference(finished.parameters_path, reference.parameters_path) <= tolerance


@pytest.mark.slow
async def test_without_a_fault_the_result_is_that_of_the_reduction_after_the_passes(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        after = await train(a, spec_file(**DIVIDED, **UNCLIPPED), ["w0", "w1"])
        beside = await train(a, spec_file(**OVERLAP, **UNCLIPPED), ["v0", "v1"])
        # Of two numbers the sum does not depend on their order.
        assert largest_difference(after.parameters_path, beside.parameters_path) == 0.0
        await check_result(a, spec_file(**UNCLIPPED, exact=False), beside)


@pytest.mark.parametrize(
    ("at", "sums"),
    [
        *((at, STEADY) for at in ("launch:2", "apply")),
        *(pytest.param(at, STEADY, marks=pytest.mark.slow) for at in ("launch:0", "reduce", "update", "gather:1")),
        # Sums of their own are reduced behind the passes; parameters are gathered beside them all the same.
        ("gather:1", UNCLIPPED | DETERMINISTIC),
    ],
)
async def test_survivors_keep_their_sums_until_the_update(
    at: str, sums: dict[str, Any], tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """Of three replicas one is lost with its node: its micro-batches alone are computed again."""
    spec, launched = spec_file(**OVERLAP, **sums, **COPIED_ONCE), at.startswith("launch")
    async with agent(tmp_path / "run") as a:
        nodes = SmallBuckets(a, spec, shared_memory, {"w0": "n0", "w1": "n1", "w2": "n2"})
        # The others come into the step behind w1's, and no further, before w1 is lost.
        hang = f"0:{STEP + 2}:0:hang"
        # A bucket group that no backward pass sends is sent behind the fault point ``reduce``.
        await nodes.train_to("w1", STEP, at, then=f"{hang},1:{STEP}:reduce:exception" if launched else hang)
        survivors = ["w0", "w2"]
        await a.in_step(survivors, STEP, "update" if at in ("update", "apply") else "reduce")
        assert not a.of(Raised, "w1")
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
        tolerance = 0.0 if "deterministic_sums" in sums else TOLERANCE
        await check_result(a, spec_file(**sums, exact=False), await a.finished(3), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "at"),
    [
        (TaskLayout(2, 1, 2), "update"),
        (TaskLayout(1, 2, 2), "launch:0"),
        (TaskLayout(1, 2, 2, interleave=2), "update"),
    ],
    ids=str,
)
async def test_replicas_of_several_ranks_keep_their_sums_too(
    layout: TaskLayout, at: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """A rank of one of two replicas is lost. Then the other replica, which is alone, leaves before its update.

    Of some totals the ranks of a replica add up what each has (norms; embeddings of the first and the last stage). They
    do so again after the second fault, and may not add to the sums of before.
    """
    parallel = {
        "distributed_optimizer": True, "overlap": True,
        "sequence_parallel": layout.tensor > 1, "interleave": layout.interleave,
    }  # fmt: skip
    model = MODEL | {"qk_layernorm": True, "layers": layout.pipeline * layout.interleave}
    fields: dict[str, Any] = {"exact": False, "model": model, **STEADY}
    spec = spec_file(**fields, parallel=parallel, **COPIED_ONCE)
    survivors, spare = (["w0", "w1"], "w2") if layout.tensor > 1 else (["w0", "w2"], "w1")
    # What two nodes have of the others' parts is everything.
    places = {f"w{i}": f"n{i}" for i in range(layout.size)} | {spare: "n0"}
    async with agent(tmp_path / "run") as a:
        nodes = SmallBuckets(a, spec, shared_memory, places)
        then = ",".join(f"*:{STEP + 1}:update:{kind}" for kind in ("hang", "communication"))  # all ranks are there
        if at == "launch:0":
            then += f",3:{STEP}:reduce:exception"  # none is sent behind the passes
        await nodes.train_to("w3", STEP, at, tensor=layout.tensor, pipeline=layout.pipeline, then=then)
        await a.in_step(survivors, STEP, "update" if at == "update" else "reduce")
        assert not a.of(Raised, "w3")
        a.kill("w3")
        shutil.rmtree(nodes.folder("n3"))
        await a.hold([*survivors, spare])
        a.kill(spare)
        generation = await a.configure(
            dict.fromkeys(survivors, "live"), stage="interrupted", tensor=layout.tensor, pipeline=layout.pipeline,
            complete=False, fault_step=STEP - 1,
        )  # fmt: skip
        resumed = await a.resumed(generation)
        assert {(r.step, r.steps_recomputed, r.computed) for r in resumed} == {(STEP, 0, 6)}
        for worker in survivors:
            await a.stopped(worker)
        await a.hold(survivors)
        generation = await a.configure(
            dict.fromkeys(survivors, "live"), stage="interrupted", tensor=layout.tensor, pipeline=layout.pipeline
        )
        resumed = await a.resumed(generation)
        assert {(r.source, r.step, r.computed) for r in resumed} == {("own", STEP + 1, 0)}
        await check_result(a, spec_file(**fields), await a.finished(2))


@pytest.mark.slow
async def test_a_script_with_stock_settings_that_computes_all_micro_batches_in_one_call(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    async with agent(tmp_path / "run") as a:
        spec = spec_file(script=str(example(tmp_path, *CLIPPED)), exact=False, **FIELDS)
        await a.fork("w0", spec)
        await a.configure({"w0": "initial"})
        expected = await a.finished(1)
        example(tmp_path, *CLIPPED, *STOCK_OVERLAP, *ALL_AT_ONCE)
        a.messages.clear()
        workers = ["v0", "v1"]
        await asyncio.gather(*(a.fork(worker, spec, SMALL_BUCKETS) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"))
        finished = await a.finished(2)
        assert finished.samples_sha256 == expected.samples_sha256
        assert largest_difference(finished.parameters_path, expected.parameters_path) <= TOLERANCE


@pytest.mark.slow
async def test_a_rank_lost_before_its_parameters_are_sent_takes_the_others_one_step_back(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """The others wait for its part of the update in their next forward pass. That part is nowhere else."""
    spec = spec_file(**OVERLAP, **STEADY, **COPIED_ONCE)
    async with agent(tmp_path / "run") as a:
        nodes = SmallBuckets(a, spec, shared_memory, {"w0": "n0", "w1": "n1", "w2": "n2"})
        await nodes.train_to("w1", STEP, "gather")
        survivors = ["w0", "w2"]
        await a.in_step(survivors, STEP + 1, "begun")
        a.kill("w1")
        shutil.rmtree(nodes.folder("n1"))
        await a.hold(survivors)
        assert {m.step for m in a.of(Held)} == {STEP - 1}
        members = dict.fromkeys(survivors, "live")
        resumed = await a.resumed(await a.configure(members, stage="interrupted", complete=False, fault_step=STEP))
        assert {(r.step, r.steps_recomputed, r.computed) for r in resumed} == {(STEP, 1, 0)}
        await check_result(a, spec_file(**STEADY, exact=False), await a.finished(2))


@pytest.mark.parametrize("held", [False, True])
def test_what_was_gathered_does_not_count_once_the_generation_is_held(held: bool) -> None:
    """On a device an aborted gather ends without an error, also where the hold spares the replica's own groups."""
    settled: list[bool] = []
    nothing: dict[str, Any] = dict.fromkeys(
        ("mark", "finish_micro_batch", "progress", "wait_in_passes"), lambda *_, **__: None
    )
    state = SimpleNamespace(
        gather=SimpleNamespace(settle_once=lambda has_ended: settled.append(has_ended()), pending=False),
        step_in_progress=SimpleNamespace(remaining=lambda: [0]),
        commit=lambda *_: None,
        loss_scale=LossScale(torch.nn.Linear(1, 1), 1),
    )
    faults = SimpleNamespace(finished_passes=lambda _, losses: losses)
    host: Any = SimpleNamespace(
        link=SimpleNamespace(counts=lambda _, shared: not held, **nothing), rank_state=state, faults=faults
    )
    Step(host, 1, [0]).commit(0, 1.0, [0])
    assert settled == [not held]


@pytest.mark.slow
async def test_where_nobody_is_lost_nothing_is(tmp_path: Path, spec_file: SpecFile) -> None:
    """Whatever a broken generation leaves of a gather, the ranks' own parts are whole; a broken launch ends no pass."""
    faults = "1:2:gather:communication,1:4:launch:1:communication,1:6:0:hang"
    workers = ["w0", "w1"]
    async with agent(tmp_path / "run") as a:
        expected = await train(a, spec_file(**OVERLAP, **UNCLIPPED, steps=7), ["v0", "v1"])
        spec = spec_file(**OVERLAP, **UNCLIPPED, steps=7, checkpoint={"every": 5})
        a.messages.clear()
        env = SMALL_BUCKETS | WRITES_AT_ONCE | {"UNICRON_FAIL_AT": faults}
        await asyncio.gather(*(a.fork(worker, spec, env) for worker in workers))
        generation = await a.configure(dict.fromkeys(workers, "initial"))
        for step in (2, 4):
            await a.until(partial(a.of, Raised, "w1", generation))
            await a.in_step(["w0"], *((3, "begun") if step == 2 else (4, "reduce")))
            await a.hold(workers)
            generation = await a.configure(dict.fromkeys(workers, "live"), stage="interrupted")
            resumed = await a.resumed(generation)
            if step == 2:
                assert "live" in {r.source for r in resumed}
                assert {(r.step, r.steps_recomputed) for r in resumed} == {(3, 0)}
            else:
                assert {(r.source, r.step, r.computed) for r in resumed} == {("own", 4, 0)}
        await a.stopped("w1")
        await a.drain(workers)
        resumed = await a.resumed(await a.configure(dict.fromkeys(workers, "live")))
        assert {r.source for r in resumed} == {"own"}, "drained ranks have gathered"
        finished = await a.finished(2)
        assert finished.samples_sha256 == expected.samples_sha256
        assert largest_difference(finished.parameters_path, expected.parameters_path) == 0.0
        (saved,) = a.of(Checkpointed)
        a.messages.clear()
        await a.fork("x0", spec)
        await a.configure({"x0": "checkpoint"}, checkpoint=saved.path)
        alone = await a.finished(1)
        assert largest_difference(alone.parameters_path, expected.parameters_path) <= TOLERANCE
