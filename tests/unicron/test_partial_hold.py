"""A hold breaks off what has lost a rank. A healthy replica's pass goes on, and its micro-batches are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.unicron.conftest import MODEL, SpecFile, largest_difference
from tests.unicron.harness import Agent, agent, reference_of
from unicron.protocol.environment import BUCKET_BYTES, FINISH_FLOOR_S
from unicron.protocol.messages import AskGroups, Finished, Groups, Held, Hold, Raised, Resumed

STEP = 2
ROUNDING = 1e-4
"""Between two orders of additions in float32. Adam enlarges the rounding of gradients that are zero but for that."""


class Ranks(NamedTuple):
    """Two replicas of two ranks: w0 is in the healthy one, w3 is lost."""

    tensor: int
    pipeline: int
    peer: str
    """The other rank of w0's replica."""
    spare: str
    """The other rank of w3's."""
    interleave: int = 1
    """Model chunks of each rank."""

    @property
    def fields(self) -> dict[str, Any]:
        """Of the specification."""
        parallel = {"parallel": {"interleave": self.interleave}} if self.interleave > 1 else {}
        return {"model": MODEL | {"layers": self.pipeline * self.interleave}, **parallel}


TENSOR, PIPELINE = Ranks(2, 1, "w1", "w2"), Ranks(1, 2, "w2", "w1")
INTERLEAVED = PIPELINE._replace(interleave=2)


async def begin(a: Agent, spec: Path, ranks: Ranks, fail_at: str, env: Mapping[str, str] | None = None) -> None:
    workers = ["w0", "w1", "w2", "w3"]
    await asyncio.gather(*(a.fork(worker, spec, {"UNICRON_FAIL_AT": fail_at, **(env or {})}) for worker in workers))
    await a.configure(dict.fromkeys(workers, "initial"), tensor=ranks.tensor, pipeline=ranks.pipeline)


async def check_result(a: Agent, spec: Path, finished: Finished) -> None:
    """Compare with a failure-free run in one process."""
    reference = await reference_of(a, spec)
    assert finished.samples_sha256 == reference.samples_sha256
    assert largest_difference(finished.parameters_path, reference.parameters_path) <= ROUNDING


@pytest.mark.parametrize(
    "ranks",
    [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (TENSOR, INTERLEAVED)), PIPELINE],
    ids=["tensor", "interleaved", "pipeline"],
)
async def test_a_healthy_replica_computes_the_rest_of_its_micro_batches(
    ranks: Ranks, tmp_path: Path, spec_file: SpecFile
) -> None:
    """A rank dies in its backward pass. The healthy replica's ranks hear of it at different times, in another one."""
    spec = spec_file(**ranks.fields, exact=False)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ranks, f"3:{STEP}:1.backward:kill,0:{STEP}:2.backward:hang")
        await a.stopped("w0")
        await a.until(lambda: "w3" in a.exits)
        whole, hold = ["w0", ranks.peer], Hold(generation=1, lost=["w3"])
        for worker in (ranks.spare, ranks.peer):
            a.send(worker, hold)
        await a.until(lambda: a.of(Held, ranks.spare))
        # What the peer answers behind the hold says that the hold has come, before w0 goes on and the reduction begins.
        a.send(ranks.peer, AskGroups(request=1))
        await a.until(lambda: a.of(Groups, ranks.peer))
        assert not a.of(Held, ranks.peer)  # it cannot finish before w0 goes on, which has not heard of the hold
        a.go_on(["w0"])
        await a.until(lambda: a.of(Held, ranks.peer))
        await a.hold(["w0", "w1", "w2"])
        members = dict.fromkeys(whole, "live")
        generation = await a.configure(members, stage="interrupted", tensor=ranks.tensor, pipeline=ranks.pipeline)
        resumed = await a.resumed(generation)
        # The lost replica's six of the twelve micro-batches, and no other.
        assert [(r.step, r.source, r.computed) for r in resumed] == [(STEP, "own", 6)] * 2
        assert {m.kind for m in a.errors()} <= {"communication"}
        assert not a.of(Raised, ranks.peer)
        await check_result(a, spec, await a.finished(2))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["second hold", "limit"])
async def test_a_replica_of_which_a_rank_hangs_is_broken_off(how: str, tmp_path: Path, spec_file: SpecFile) -> None:
    """While a healthy replica finishes, one of its ranks hangs. The two that are left are a replica together."""
    spec = spec_file(exact=False)
    env = {FINISH_FLOOR_S: "0.1"} if how == "limit" else {}
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, TENSOR, f"3:{STEP}:1.backward:kill,0:{STEP}:2.backward:hang", env)
        await a.stopped("w0")
        await a.until(lambda: "w3" in a.exits)
        for worker in ("w1", "w2"):
            a.send(worker, Hold(generation=1, lost=["w3"]))
        await a.until(lambda: a.of(Held, "w2"))
        if how == "second hold":
            assert not a.of(Held, "w1")
            a.send("w1", Hold(generation=1, lost=["w0", "w3"]))
        await a.until(lambda: a.of(Held, "w1"))
        a.kill("w0")
        await a.until(lambda: "w0" in a.exits)
        members = {"w2": "live", "w1": "live"}
        resumed = await a.resumed(await a.configure(members, stage="interrupted", tensor=2))
        assert {(r.step, r.source) for r in resumed} == {(STEP, "own")}
        await check_result(a, spec, await a.finished(2))


@pytest.mark.slow
@pytest.mark.parametrize(("at", "computed"), [("1", 12), ("update", 0)])
async def test_a_rank_that_leaves_its_step_breaks_its_replica_off(
    at: str, computed: int, tmp_path: Path, spec_file: SpecFile
) -> None:
    """Nobody holds the generation: without the rank that left, its peer would wait for ever.

    In a pass the peer loses all that it has added to its gradient buffers; before the update nothing is lost.
    """
    spec = spec_file(exact=False)
    async with agent(tmp_path / "run") as a:
        workers = ["w0", "w1"]
        fail_at = f"1:{STEP}:{at}:communication"
        await asyncio.gather(*(a.fork(worker, spec, {"UNICRON_FAIL_AT": fail_at}) for worker in workers))
        await a.configure(dict.fromkeys(workers, "initial"), tensor=2)
        await a.until(lambda: a.of(Raised, "w0") and a.of(Raised, "w1"))
        assert {m.kind for m in a.errors()} == {"communication"}
        await a.hold(workers)
        resumed = await a.resumed(await a.configure(dict.fromkeys(workers, "live"), stage="interrupted", tensor=2))
        assert [(r.step, r.computed) for r in resumed] == [(STEP, computed)] * 2
        await check_result(a, spec, await a.finished(2))


@pytest.mark.slow
async def test_a_shard_that_is_reduced_is_left_alone_while_another_one_is_computed(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    """One shard's ranks have reduced all buckets, the other's only the first: a pass adds to the buffers of both."""
    spec = spec_file(exact=False)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, TENSOR, f"3:{STEP}:reduce:1:kill", {BUCKET_BYTES: "8192"})
        await a.until(lambda: "w3" in a.exits)
        await a.in_step(["w0", "w2"], STEP, "update")
        await a.hold(["w0", "w1", "w2"])
        generation = await a.configure(dict.fromkeys(["w0", "w1"], "live"), stage="interrupted", tensor=2)
        await a.resumed(generation)
        (one,), (other,) = a.of(Resumed, "w0", generation), a.of(Resumed, "w1", generation)
        assert (one.buckets_kept, other.buckets_kept) == (one.buckets, 1)
        assert (one.step, one.computed, other.computed) == (STEP, 6, 6)
        await check_result(a, spec, await a.finished(2))
