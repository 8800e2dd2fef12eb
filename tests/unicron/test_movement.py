"""State moves from any layout to any other through memory; nothing is read from a file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.harness import Agent, agent
from unicron.movement import ROUND_VARIABLE
from unicron.protocol import Checkpointed, Finished, Progress, Raised

TOLERANCE = 1e-5
pytestmark = pytest.mark.timeout(180)

Layout = tuple[int, int, int]
"""(processes, tensor, pipeline)"""


def workers(layout: Layout) -> list[str]:
    return [f"w{i}" for i in range(layout[0])]


async def begin(a: Agent, spec: Path, layout: Layout, fail_at: Sequence[str] = ()) -> None:
    """Fork the workers of a layout, each with the fault of its rank, and begin to train."""
    faults = {fault.split(":")[0]: {"UNICRON_FAIL_AT": fault, ROUND_VARIABLE: "20000"} for fault in fail_at}
    await asyncio.gather(*(a.fork(w, spec, faults.get(str(rank), {})) for rank, w in enumerate(workers(layout))))
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
    a.messages.clear()
    await a.fork("reference", spec)
    await a.configure({"reference": "initial"})
    reference = await a.finished(1)
    assert finished.samples_sha256 == reference.samples_sha256
    assert largest_difference(finished.parameters_path, reference.parameters_path) <= TOLERANCE


@pytest.mark.parametrize(
    ("before", "after", "sharded"),
    [
        ((2, 1, 1), (2, 2, 1), False),
        ((2, 2, 1), (2, 1, 1), True),
        pytest.param((2, 1, 2), (4, 1, 2), True, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), (3, 1, 1), False, marks=pytest.mark.slow),
    ],
)
async def test_a_healthy_task_changes_its_layout(
    before: Layout, after: Layout, sharded: bool, tmp_path: Path, spec_file: SpecFile
) -> None:
    spec = spec_file(steps=10, parallel={"distributed_optimizer": sharded})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, before)
        await a.resumed(1)
        await relayout(a, spec, workers(before)[: after[0]], after)
        finished = await a.finished(after[0])
        await check_result(a, spec_file(steps=10), finished)


@pytest.mark.parametrize(("pipeline", "at"), [(1, "2.backward"), (2, "reduce")])
async def test_whole_replicas_finish_the_step_and_all_take_part_in_what_follows(
    pipeline: int, at: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    """One member of one of two replicas is lost; the other member of it stands by, and computes in the next layout."""
    tensor = 2 // pipeline
    whole, spare, lost = (["w0", "w1"], "w2", "w3") if tensor == 2 else (["w0", "w2"], "w1", "w3")
    spec = spec_file(steps=8)
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (4, tensor, pipeline), [f"3:3:{at}:kill"])
        await a.until(lambda: lost in a.exits)

        # The others may still be at the end of the step before, if the machine is busy, or have micro-batches to do.
        def has_come(worker: str) -> bool:
            return any(m.step == 3 and (at != "reduce" or m.phase == "reduce") for m in a.of(Progress, worker))

        await a.until(lambda: all(has_come(worker) for worker in (*whole, spare)))
        await a.hold([*whole, spare])
        generation = await a.configure(
            dict.fromkeys(whole, "live"), stage="interrupted", tensor=tensor, pipeline=pipeline
        )
        resumed = await a.resumed(generation)
        assert {(r.step, r.source, r.steps_recomputed) for r in resumed} == {(3, "own", 0)}
        if at == "reduce":
            assert {r.computed for r in resumed} == {6}  # what the broken replica had computed, and no more
        await a.drain(whole)
        resumed = await a.resumed(await a.configure(dict.fromkeys([spare, *whole], "live")))
        assert {r.source for r in resumed} == {"live"}
        await check_result(a, spec, await a.finished(3))


async def test_what_was_held_is_there_after_a_move_that_broke(tmp_path: Path, spec_file: SpecFile) -> None:
    """Two replicas are to become two slices each; one process dies in the midst, and a single one goes on alone."""
    spec = spec_file(steps=6)
    env = {ROUND_VARIABLE: "20000"}
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (2, 1, 1), ["0:3:reduce:communication", "1:3:move:1:kill"])
        await a.until(lambda: a.of(Raised, "w0"))
        await a.hold(["w0", "w1"])
        await asyncio.gather(a.fork("w2", spec, env), a.fork("w3", spec, env))
        await a.configure({"w0": "live", "w2": "take", "w1": "live", "w3": "take"}, tensor=2)
        await a.until(lambda: "w1" in a.exits)
        await a.hold(["w0"])
        (resumed,) = await a.resumed(await a.configure({"w0": "live"}))
        assert (resumed.step, resumed.source, resumed.steps_recomputed) == (3, "own", 0)
        await check_result(a, spec, await a.finished(1))


async def test_a_divided_optimizer_outlives_a_newcomer_and_keeps_the_step(tmp_path: Path, spec_file: SpecFile) -> None:
    """The parts are cut anew for one replica more and, as that one dies in the midst of taking, are still the old ones.

    Then another comes in: the gradients of the interrupted step stay with those who have them, whatever else moves.
    """
    spec = spec_file(steps=8, parallel={"distributed_optimizer": True})
    env = {ROUND_VARIABLE: "20000"}
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (2, 1, 1), ["0:3:reduce:communication", "1:9:0:kill"])
        await a.until(lambda: a.of(Raised, "w0"))
        await a.until(lambda: [m for m in a.of(Progress, "w1") if (m.step, m.phase) == (3, "reduce")])
        await a.hold(["w0", "w1"])
        await a.fork("w2", spec, env | {"UNICRON_FAIL_AT": "2:1:move:1:kill:always"})
        await a.configure({"w0": "live", "w1": "live", "w2": "take"})
        await a.until(lambda: "w2" in a.exits)
        await a.hold(["w0", "w1"])
        await a.fork("w3", spec, env)
        members = {"w0": "live", "w3": "take", "w1": "live"}
        resumed = await a.resumed(await a.configure(members, stage="interrupted"))
        assert {(r.step, r.steps_recomputed, r.computed) for r in resumed} == {(3, 0, 0)}
        await check_result(a, spec, await a.finished(3))


async def test_a_part_that_is_lost_is_missed(tmp_path: Path, spec_file: SpecFile) -> None:
    """What the survivor of two holds is no whole state: it goes back to a checkpoint, written by two, read by three."""
    spec = spec_file(steps=8, checkpoint={"every": 3}, parallel={"distributed_optimizer": True})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (2, 1, 1), ["1:6:1:kill"])
        await a.until(lambda: "w1" in a.exits)
        await a.hold(["w0"])
        (saved,) = a.of(Checkpointed)
        await asyncio.gather(a.fork("w2", spec), a.fork("w3", spec))
        members = {"w0": "live", "w2": "take", "w3": "take"}
        resumed = await a.resumed(await a.configure(members, checkpoint=saved.path, fault_step=5))
        assert {(r.step, r.source, r.steps_recomputed) for r in resumed} == {(4, "checkpoint", 2)}
        finished = await a.finished(3)
        await check_result(a, spec_file(steps=8), finished, checkpoints=True)


BREAKS_GATHERING = """
import os
from pathlib import Path
from unicron import model, train
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


async def test_an_update_that_was_not_gathered_counts(tmp_path: Path, spec_file: SpecFile) -> None:
    """Every rank has updated its part of the parameters, and not all of the others': together they hold the step."""
    script = tmp_path / "script.py"
    script.write_text(BREAKS_GATHERING)
    fields = {"steps": 6, "parallel": {"distributed_optimizer": True}}
    spec = spec_file(**fields, script=str(script))
    names = ["w0", "w1", "w2"]
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, (3, 1, 1))
        await a.until(lambda: a.of(Raised, "w1"))
        await a.hold(names)
        resumed = await a.resumed(await a.configure(dict.fromkeys(names, "live"), stage="interrupted"))
        assert {(r.step, r.source) for r in resumed} == {(4, "live")}
        finished = await a.finished(3)
        await check_result(a, spec_file(steps=6), finished)
