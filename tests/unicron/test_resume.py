"""An interrupted step resumes: computed micro-batches and reduced buckets are kept, and nothing is counted twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent, reference_of
from unicron.protocol.messages import Checkpointed, Finished, Progress, Resumed
from unicron.training.step import BUCKET_REPORTS

WORKERS = ["w0", "w1", "w2"]
SMALL_BUCKETS = {"UNICRON_BUCKET_BYTES": str(16 << 10)}
"""As for a large model: several buckets."""

ROUNDING = 1e-6
"""Largest difference between parameters of at most 1 after a few steps of SGD. (Adam is not used: the gradients of the
keys' biases are zero but for rounding, and Adam would divide the rounding by its own size.)"""

MODES = [
    pytest.param({"exact": True}, id="exact", marks=pytest.mark.slow),
    pytest.param({"optimizer": {"name": "sgd", "lr": 0.1}}, id="default"),
]


def specified(spec_file: SpecFile, mode: dict[str, Any], **fields: Any) -> Path:
    return spec_file(**({"exact": False} | mode | fields))


async def begin(a: Agent, spec: Path, fail_at: str, env: dict[str, str] | None = None) -> None:
    env = {"UNICRON_FAIL_AT": fail_at, **(env or {})}
    await asyncio.gather(*(a.fork(worker, spec, env) for worker in WORKERS))
    await a.configure(dict.fromkeys(WORKERS, "initial"))


async def lose(a: Agent, step: int, phase: str = "") -> None:
    """Kill w1, which its fault has stopped, once the others are in a step, and hold these."""
    await a.lose("w1", step, phase)
    await a.hold(["w0", "w2"])


async def check_result(a: Agent, spec: Path, finished: Finished, *, exact: bool) -> None:
    """Compare with a failure-free run of the same specification in one process."""
    reference = await reference_of(a, spec)
    assert (finished.step, finished.samples_sha256) == (reference.step, reference.samples_sha256)
    assert finished.loss == pytest.approx(reference.loss, rel=0.0 if exact else 1e-6, abs=0.0)
    difference = largest_difference(finished.parameters_path, reference.parameters_path)
    assert difference == 0.0 if exact else difference <= ROUNDING


def computed(resumed: list[Resumed]) -> int:
    return sum(r.computed for r in resumed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "newcomer",
    [pytest.param(False, id="survivors"), pytest.param(True, id="with a newcomer")],
)
async def test_reduced_buckets_are_kept(
    tmp_path: Path, spec_file: SpecFile, mode: dict[str, Any], newcomer: bool
) -> None:
    spec = specified(spec_file, mode, steps=4)
    # Few enough to be reported one by one; exact sums take four times the bytes.
    few_buckets = {"UNICRON_BUCKET_BYTES": str((64 if "exact" in mode else 16) << 10)}
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, "1:2:reduce:2:hang", few_buckets)

        def reduced(worker: str) -> list[int]:
            return [m.buckets for m in a.of(Progress, worker) if m.step == 2 and m.buckets is not None]

        await a.until(lambda: all(2 in reduced(worker) for worker in WORKERS if worker != "w1"))
        if newcomer:
            await a.fork("w3", spec, few_buckets)
        assert reduced("w0") == reduced("w2") == [0, 1, 2]  # the reduction begins with none
        await a.hold(["w0", "w2"])
        a.kill("w1")
        members = {"w0": "live", "w2": "live"} | ({"w3": "take"} if newcomer else {})
        resumed = await a.resumed(await a.configure(members, stage="interrupted"))
        assert {(r.step, r.buckets_kept) for r in resumed} == {(2, 2)}
        assert 3 < resumed[0].buckets <= BUCKET_REPORTS
        assert computed(resumed) == 4  # the lost rank's, and no others
        if newcomer:
            assert sorted(r.computed for r in resumed) == [1, 1, 2]
        finished = await a.finished(len(members))
        await check_result(a, spec, finished, exact="exact" in mode)


@pytest.mark.slow
async def test_few_messages_report_a_reduction_of_many_buckets(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(steps=1), {"UNICRON_BUCKET_BYTES": str(4 << 10)})
        await a.configure({"w0": "initial"})
        await a.finished(1)
        (resumed,) = a.of(Resumed)
        reported = [m.buckets for m in a.of(Progress) if m.buckets is not None]
        assert resumed.buckets > 4 * BUCKET_REPORTS
        assert 0 < len(reported) <= BUCKET_REPORTS


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_nothing_is_recomputed_when_all_is_reduced(
    tmp_path: Path, spec_file: SpecFile, mode: dict[str, Any]
) -> None:
    spec = specified(spec_file, mode, steps=4)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, "*:2:update:communication", SMALL_BUCKETS)
        await a.until(lambda: len(a.errors()) == 3)
        await a.hold(WORKERS)
        resumed = await a.resumed(await a.configure(dict.fromkeys(WORKERS, "live"), stage="interrupted"))
        assert {(r.step, r.source, r.computed) for r in resumed} == {(2, "own", 0)}
        assert {r.buckets_kept for r in resumed} == {resumed[0].buckets}
        finished = await a.finished(3)
        await check_result(a, spec, finished, exact="exact" in mode)


@pytest.mark.parametrize("at", ["1.backward", pytest.param("1.forward", marks=pytest.mark.slow)])
async def test_a_rank_is_lost_inside_a_micro_batch(tmp_path: Path, spec_file: SpecFile, at: str) -> None:
    mode = MODES[at == "1.forward"].values[0]
    assert isinstance(mode, dict)
    spec = specified(spec_file, mode, steps=4)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, f"1:2:{at}:hang")
        await lose(a, 2, "reduce")  # the others have computed all of theirs
        resumed = await a.resumed(await a.configure({"w0": "live", "w2": "live"}, stage="interrupted"))
        assert (resumed[0].step, computed(resumed)) == (2, 4)
        finished = await a.finished(2)
        await check_result(a, spec, finished, exact="exact" in mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_a_half_done_micro_batch_is_discarded(tmp_path: Path, spec_file: SpecFile, mode: dict[str, Any]) -> None:
    """The rank that failed goes on. Separate sums keep the finished micro-batches; sums in place are discarded."""
    spec = specified(spec_file, mode, steps=4)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, "1:2:2.backward:communication", SMALL_BUCKETS)
        await a.until(lambda: {m.rank for m in a.of(Progress) if m.step == 2 and m.phase == "reduce"} == {0, 2})
        await a.until(a.errors)
        await a.hold(WORKERS)
        resumed = await a.resumed(await a.configure(dict.fromkeys(WORKERS, "live"), stage="interrupted"))
        assert {(r.step, r.source) for r in resumed} == {(2, "own")}
        assert computed(resumed) == (2 if "exact" in mode else 4)
        finished = await a.finished(3)
        await check_result(a, spec, finished, exact="exact" in mode)


async def test_a_half_applied_update_is_no_state(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(steps=4)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, "1:2:apply:communication")
        await a.until(a.errors)
        await a.in_step(["w0", "w2"], 2, "ended")
        await a.hold(WORKERS)
        resumed = await a.resumed(await a.configure(dict.fromkeys(WORKERS, "live"), stage="interrupted"))
        assert sorted(r.source for r in resumed) == ["live", "own", "own"]
        assert a.of(Resumed, "w1", 2)[0].source == "live"
        finished = await a.finished(3)
        await check_result(a, spec, finished, exact=True)


@pytest.mark.slow
async def test_a_rank_is_lost_during_a_checkpoint(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(checkpoint={"every": 2})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, "1:2:checkpoint:hang")
        await lose(a, 3)
        assert not a.of(Checkpointed)
        resumed = await a.resumed(await a.configure({"w0": "live", "w2": "live"}, stage="interrupted"))
        # Nobody waits for a checkpoint: the others are in the next step when they hear of the loss.
        assert {(r.step, r.source) for r in resumed} == {(3, "own")}
        finished = await a.finished(2)
        # Step 2's is given up, and made up for at the new generation's first boundary.
        assert a.of(Checkpointed)[0].step == 3
        await check_result(a, spec, finished, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["replicated", "distributed"])
async def test_a_task_that_begins_anew_has_the_initial_state(
    tmp_path: Path, spec_file: SpecFile, distributed_optimizer: bool
) -> None:
    """Without a checkpoint the survivors start from the initial parameters and empty optimizer state."""
    spec = spec_file(steps=4, exact=True, parallel={"distributed_optimizer": distributed_optimizer})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, "1:3:1:hang")
        await lose(a, 3)
        resumed = await a.resumed(await a.configure({"w0": "initial", "w2": "initial"}, fault_step=2))
        assert {(r.step, r.source, r.steps_recomputed) for r in resumed} == {(1, "initial", 2)}
        finished = await a.finished(2)
        await check_result(a, spec_file(steps=4), finished, exact=True)
