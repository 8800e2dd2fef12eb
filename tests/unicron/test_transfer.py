"""State is transferred from one layout to another between the memories of ranks; no file is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unicron.conftest import TWO_LAYERS, SpecFile, largest_difference
from tests.unicron.harness import Agent, agent, reference_of
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.protocol.environment import ROUND_BYTES
from unicron.protocol.messages import Checkpointed, Finished, Raised

TOLERANCE = 1e-5

Layout = tuple[int, int, int]
"""(processes, tensor, pipeline)"""

SMALL_ROUNDS = {ROUND_BYTES: "20000"}
"""Has the state move in several rounds. All members of a generation need the same."""


def workers(layout: Layout) -> list[str]:
    return [f"w{i}" for i in range(layout[0])]


async def begin(a: Agent, spec: Path, layout: Layout, *fail_at: str, small_rounds: bool = False) -> None:
    """Fork the workers of a layout, each with the injected faults of its rank, and begin to train."""
    env = ({"UNICRON_FAIL_AT": ",".join(fail_at)} if fail_at else {}) | (SMALL_ROUNDS if small_rounds else {})
    env |= WRITES_AT_ONCE
    await asyncio.gather(*(a.fork(worker, spec, env) for worker in workers(layout)))
    await a.configure(dict.fromkeys(workers(layout), "initial"), tensor=layout[1], pipeline=layout[2])


async def relayout(a: Agent, spec: Path, old: Sequence[str], layout: Layout) -> None:
    """Drain the old members at a boundary and bring a new layout up, with new processes where it is larger."""
    await a.drain(list(old))
    added = [worker for worker in workers(layout) if worker not in old]
    await asyncio.gather(*(a.fork(worker, spec) for worker in added))
    members = {worker: "live" if worker in old else "take" for worker in workers(layout)}
    for worker in set(old) - members.keys():
        members[worker] = "live"
    await a.resumed(await a.configure(members, tensor=layout[1], pipeline=layout[2]))


async def check_result(a: Agent, spec: Path, finished: Finished, *, checkpoints: bool = False) -> None:
    """Compare with a failure-free run in one process."""
    assert checkpoints or not list(a.folder.rglob("step-*"))
    reference = await reference_of(a, spec)
    assert finished.samples_sha256 == reference.samples_sha256
    assert largest_difference(finished.parameters_path, reference.parameters_path) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "distributed_optimizer"),
    [
        ((2, 2, 1), (2, 1, 1), True),
        ((2, 1, 1), (2, 2, 1), False),
        ((2, 1, 2), (4, 1, 2), True),
        ((4, 2, 1), (3, 1, 1), False),
    ],
)
async def test_a_healthy_task_changes_its_layout(
    before: Layout, after: Layout, distributed_optimizer: bool, tmp_path: Path, spec_file: SpecFile
) -> None:
    spec = spec_file(model=TWO_LAYERS, parallel={"distributed_optimizer": distributed_optimizer})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, before, "1:3:0:hang")
        await a.stopped("w1")
        await relayout(a, spec, workers(before)[: after[0]], after)
        finished = await a.finished(after[0])
        await check_result(a, spec_file(model=TWO_LAYERS), finished)


@pytest.mark.parametrize(("pipeline", "at"), [(1, "2.backward"), pytest.param(2, "reduce", marks=pytest.mark.slow)])
async def test_whole_replicas_finish_the_step_and_all_survivors_join_the_next_layout(
    pipeline: int, at: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    """One of two replicas loses a member; its other member waits, and computes in the next layout."""
    tensor = 2 // pipeline
    whole, spare, lost = (["w0", "w1"], "w2", "w3") if tensor == 2 else (["w0", "w2"], "w1", "w3")
    spec = spec_file(model=TWO_LAYERS)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (4, tensor, pipeline), f"3:2:{at}:hang", "0:4:0:hang")
        await a.lose(lost, 2, "reduce" if at == "reduce" else "")
        await a.hold([*whole, spare])
        generation = await a.configure(
            dict.fromkeys(whole, "live"), stage="interrupted", tensor=tensor, pipeline=pipeline
        )
        resumed = await a.resumed(generation)
        assert {(r.step, r.source, r.steps_recomputed) for r in resumed} == {(2, "own", 0)}
        if at == "reduce":
            assert {r.computed for r in resumed} == {6}  # what the broken replica had computed, and no more
        await a.stopped("w0")
        await a.drain(whole)
        resumed = await a.resumed(await a.configure(dict.fromkeys([spare, *whole], "live")))
        assert {r.source for r in resumed} == {"live"}
        await check_result(a, spec, await a.finished(3))


@pytest.mark.slow
async def test_the_state_survives_a_transfer_that_broke(tmp_path: Path, spec_file: SpecFile) -> None:
    """Two replicas are split over two tensor-parallel ranks each; a process dies meanwhile, and one goes on alone."""
    spec = spec_file()
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (2, 1, 1), "0:3:reduce:communication", "1:3:move:1:kill", small_rounds=True)
        await a.until(lambda: a.of(Raised, "w0"))
        await a.in_step(["w1"], 3)
        await a.hold(["w0", "w1"])
        await asyncio.gather(a.fork("w2", spec, SMALL_ROUNDS), a.fork("w3", spec, SMALL_ROUNDS))
        await a.configure({"w0": "live", "w2": "take", "w1": "live", "w3": "take"}, tensor=2)
        await a.until(lambda: "w1" in a.exits)
        await a.hold(["w0"])
        (resumed,) = await a.resumed(await a.configure({"w0": "live"}))
        assert (resumed.step, resumed.source, resumed.steps_recomputed) == (3, "own", 0)
        await check_result(a, spec, await a.finished(1))


@pytest.mark.slow
async def test_a_distributed_optimizer_and_the_step_survive_the_loss_of_a_newcomer(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    """A third replica dies while it receives its part of the optimizer's state; the two others still have their parts.

    Another third replica joins. The gradients of the interrupted step stay on the two ranks that have them.
    """
    spec = spec_file(parallel={"distributed_optimizer": True})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (2, 1, 1), "0:3:reduce:communication", small_rounds=True)
        await a.until(lambda: a.of(Raised, "w0"))
        await a.in_step(["w1"], 3, "reduce")
        await a.hold(["w0", "w1"])
        await a.fork("w2", spec, SMALL_ROUNDS | {"UNICRON_FAIL_AT": "2:1:move:1:kill:always"})
        await a.configure({"w0": "live", "w1": "live", "w2": "take"})
        await a.until(lambda: "w2" in a.exits)
        await a.hold(["w0", "w1"])
        await a.fork("w3", spec, SMALL_ROUNDS)
        members = {"w0": "live", "w3": "take", "w1": "live"}
        resumed = await a.resumed(await a.configure(members, stage="interrupted"))
        assert {(r.step, r.steps_recomputed, r.computed) for r in resumed} == {(3, 0, 0)}
        await check_result(a, spec_file(), await a.finished(3))


@pytest.mark.slow
async def test_a_checkpoint_is_read_where_a_part_of_the_state_is_lost(tmp_path: Path, spec_file: SpecFile) -> None:
    """The survivor of two has only a part of the optimizer's state; three ranks read the checkpoint that two wrote."""
    spec = spec_file(checkpoint={"every": 2}, parallel={"distributed_optimizer": True})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (2, 1, 1), "1:5:1:hang")
        await a.lose("w1", 5)
        await a.hold(["w0"])
        (saved,) = a.of(Checkpointed)
        await asyncio.gather(a.fork("w2", spec), a.fork("w3", spec))
        members = {"w0": "live", "w2": "take", "w3": "take"}
        resumed = await a.resumed(await a.configure(members, checkpoint=saved.path, fault_step=4))
        assert {(r.step, r.source, r.steps_recomputed) for r in resumed} == {(3, "checkpoint", 2)}
        await check_result(a, spec_file(), await a.finished(3), checkpoints=True)


BREAKS_GATHERING = """
import os
from pathlib import Path
from unicron import train
from unicron.trainer import model
from unicron.errors import CommunicationFailed

original = model.build

def build(task, tensor, pipeline):
    built, optimizer = original(task, tensor, pipeline)
    gather, calls = built.start_param_sync, []
    def start_param_sync(*arguments, **options):
        calls.append(1)
        if os.environ["UNICRON_WORKER"] == "w1" and len(calls) == 3:
            raise CommunicationFailed("injected")
        gather(*arguments, **options)
    built.start_param_sync = start_param_sync
    return built, optimizer

model.build = build
train.train(Path(os.environ["UNICRON_SPEC"]))
"""


async def test_an_update_counts_whose_parameters_were_not_gathered(tmp_path: Path, spec_file: SpecFile) -> None:
    """Every rank has updated its part of the parameters, and received not all other parts; together they have all."""
    script = tmp_path / "script.py"
    script.write_text(BREAKS_GATHERING)
    spec = spec_file(parallel={"distributed_optimizer": True}, script=str(script))
    names = ["w0", "w1", "w2"]
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (3, 1, 1))
        await a.until(lambda: a.of(Raised, "w1"))
        await a.in_step(["w0", "w2"], 3, "update")
        await a.hold(names)
        resumed = await a.resumed(await a.configure(dict.fromkeys(names, "live"), stage="interrupted"))
        assert {(r.step, r.source) for r in resumed} == {(4, "live")}
        finished = await a.finished(3)
        await check_result(a, spec_file(), finished)
