"""Snapshots as often as they are worth: all ranks agree on when, and a fault costs no more than the interval."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.condition import until
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from tests.unicron.test_recovery import check_result
from tests.unicron.test_snapshots import Nodes
from unicron.protocol.environment import MTBF_NODE_S
from unicron.protocol.messages import Progress

AUTO = {"every": 0}
"""What the specification says by itself."""
STEP = 30


def intervals(a: Agent, worker: str) -> dict[int, int | None]:
    """Return the steps between two snapshots that a worker reported with each step."""
    return {m.step: m.memory_every for m in a.of(Progress, worker) if m.phase == "ended"}


def replicated(a: Agent) -> set[bool | None]:
    return {m.replicated for m in a.of(Progress) if m.phase == "ended"}


async def train(nodes: Nodes, fail_at: str, env: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Begin the task. ``env``: worker -> variables of its own."""
    for worker, node in nodes.nodes.items():
        own = {"UNICRON_NODE": node, "UNICRON_DOMAIN": node, "UNICRON_MEMORY": str(nodes.folder(node))}
        await nodes.agent.fork(
            worker, nodes.spec, own | {"UNICRON_FAIL_AT": fail_at} | dict((env or {}).get(worker, {}))
        )
    await nodes.agent.configure(dict.fromkeys(nodes.nodes, "initial"))


async def newest_within(nodes: Nodes, applied: int, interval: int) -> int:
    """Return the newest whole set of copies, once there is one that is no older than the interval."""
    await until(lambda: applied - nodes.stored() <= interval, seen=nodes.stored)
    return nodes.stored()


@pytest.mark.slow
async def test_all_ranks_take_copies_at_the_same_steps_whatever_each_wants(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """One rank takes losses to be frequent and wants more copies, the other one wants fewer."""
    spec = spec_file(steps=STEP + 20, checkpoint=AUTO, exact=False, parallel={"distributed_optimizer": True})
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        await train(nodes, "*:30:0:sleep", {"w0": {MTBF_NODE_S: "1e-9"}, "w1": {MTBF_NODE_S: "1e12"}})
        await a.in_step(nodes.nodes, STEP)
        of_w0, of_w1 = intervals(a, "w0"), intervals(a, "w1")
        common = of_w0.keys() & of_w1.keys()
        assert len(common) > STEP // 2
        assert {n: of_w0[n] for n in common} == {n: of_w1[n] for n in common}
        assert of_w0[1] == 2
        # What one rank wants is enough to make copies rarer.
        assert max(every or 0 for every in of_w0.values()) >= 8
        newest = await newest_within(nodes, STEP - 1, of_w0[STEP - 1] or 0)
        assert newest >= 8


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True])
async def test_what_no_other_rank_has_is_copied_and_a_loss_costs_at_most_the_interval(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path, divided: bool
) -> None:
    """A lone replica that loses its process; and a divided optimizer that loses a node, copies included."""
    parallel = {"distributed_optimizer": divided}
    spec = spec_file(steps=STEP + 2, checkpoint=AUTO, exact=not divided, parallel=parallel)
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"} if divided else {"w0": "n0"})
        await train(nodes, f"*:{STEP}:0:sleep")
        await a.in_step(nodes.nodes, STEP)
        applied = STEP - 1
        interval = intervals(a, "w0")[applied]
        assert interval is not None
        newest = await newest_within(nodes, applied, interval)
        for worker in nodes.nodes:
            a.kill(worker)
        await a.until(lambda: set(nodes.nodes) <= set(a.exits))
        assert replicated(a) == {False}
        if divided:
            shutil.rmtree(nodes.folder("n1"))
        resumed = await nodes.restore(applied)
        assert {(r.step, r.steps_recomputed) for r in resumed} == {(newest + 1, applied - newest)}
        assert {r.source for r in resumed} <= {"memory", "peer-memory"}
        assert 0 < applied - newest <= interval
        finished = await a.finished(len(nodes.nodes))
        if not divided:
            await check_result(a, spec, finished)


@pytest.mark.slow
async def test_the_survivor_of_a_divided_optimizer_goes_back_to_the_newest_copies(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    spec = spec_file(steps=STEP + 2, checkpoint=AUTO, exact=False, parallel={"distributed_optimizer": True})
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        await train(nodes, f"1:{STEP}:1:sleep")
        await a.in_step(["w0"], STEP)
        applied = STEP - 1
        interval = intervals(a, "w0")[applied]
        assert interval is not None
        newest = await newest_within(nodes, applied, interval)
        a.kill("w1")
        shutil.rmtree(nodes.folder("n1"))
        await a.hold(["w0"])
        generation = await a.configure({"w0": "live"}, stage="interrupted", complete=False, fault_step=applied)
        [resumed] = await a.resumed(generation)
        assert (resumed.source, resumed.step) == ("memory", newest + 1)
        assert 0 < resumed.steps_recomputed <= interval
        await a.finished(1)


async def test_of_two_replicas_in_two_domains_one_is_lost_and_nothing_is_computed_again(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    spec = spec_file(steps=12, checkpoint=AUTO)
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        await train(nodes, "1:11:1:sleep")
        await a.in_step(["w0"], 11)
        a.kill("w1")
        shutil.rmtree(nodes.folder("n1"))
        await a.hold(["w0"])
        assert replicated(a) == {True}
        resumed = await a.resumed(await a.configure({"w0": "live"}, stage="interrupted", fault_step=10))
        assert [(r.source, r.step, r.steps_recomputed) for r in resumed] == [("own", 11, 0)]
        finished = await a.finished(1)
        assert {m.replicated for m in a.of(Progress, generation=2) if m.phase == "ended"} == {False}
        await check_result(a, spec, finished)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
async def test_a_number_means_exactly_that(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path, every: int
) -> None:
    spec = spec_file(steps=12, checkpoint={"every": 0, "memory_every": every})
    async with agent(tmp_path / "run") as a:
        nodes = Nodes(a, spec, shared_memory, {"w0": "n0", "w1": "n1"})
        await train(nodes, "*:10:0:sleep")
        await a.in_step(nodes.nodes, 10)
        # Of every step the newest may be left out, because the one before is not yet stored.
        assert await newest_within(nodes, 9, 1) >= 9 - (every == 1)
        assert set(intervals(a, "w0").values()) == {every}


async def test_without_a_place_for_copies_none_are_reported(tmp_path: Path, spec_file: SpecFile) -> None:
    async with agent(tmp_path / "run") as a:
        await a.fork("w0", spec_file(steps=3, checkpoint=AUTO))
        await a.configure({"w0": "initial"})
        await a.finished(1)
        assert set(intervals(a, "w0").values()) == {0}
