"""Faults of Megatron-LM's own ``pretrain_gpt.py`` where its model or its optimizer is divided among ranks.

A process that is lost takes the last rank of its shard in its replica with it; the other replica has all of it, or the
copies in other nodes' memory have.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.megatron_lm.courses import differing, farthest, parameters
from tests.megatron_lm.test_pretrain_gpt import CHECKOUT, write_script
from tests.parity.courses import Course, TaskLayout, plan
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.protocol.messages import Resumed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not CHECKOUT, reason="UNICRON_MEGATRON_LM names no checkout of Megatron-LM"),
]

PLACES = {"forward": 3, "reduce": 1, "launch": 1, "update": 1, "evaluate": 2, "save": 1}
"""Where a process is killed, and for the how manieth time that it comes there in or behind a step."""

IN_PLACE = tuple((place, "same") for place in PLACES if place != "launch")
"""A fault at each of them; each time, a new process takes the lost one's place."""

OVERLAPPED = tuple(("launch" if place == "reduce" else place, change) for place, change in IN_PLACE)
"""The same where gradients are reduced beside the passes, as they are without ``deterministic_sums``."""

TP2, PP2, VP2, DP2 = (
    TaskLayout(2, 1, 2), TaskLayout(1, 2, 2), TaskLayout(1, 2, 2, interleave=2), TaskLayout(1, 1, 2),
)  # fmt: skip

COURSES = [
    Course(TP2, False, IN_PLACE),
    Course(PP2, False, IN_PLACE),
    Course(VP2, False, IN_PLACE),
    Course(DP2, True, IN_PLACE),
    *(Course(layout, False, (("reduce", "shrink"),)) for layout in (TP2, PP2)),
]
"""In the last ones no process comes: a lost node had all ranks of a replica, and the other one goes on alone."""

OVERLAPS = "--overlap-grad-reduce --overlap-param-gather"

ROUNDING = 1e-4
"""How far parameters may be from the failure-free run's where gradients are reduced beside the passes, in float32:
behind a fault they are added up in another order. A step that is lost or done twice moves parameters by 1e-2."""


def arguments(course: Course, extra: str) -> str:
    """Return what of Megatron-LM's arguments says the layout, and further ones."""
    layout = course.layout
    found = f"--tensor-model-parallel-size {layout.tensor} --pipeline-model-parallel-size {layout.pipeline}"
    if layout.tensor > 1:
        found += " --sequence-parallel"
    if layout.interleave > 1:
        found += f" --num-layers 4 --num-virtual-stages-per-pipeline-rank {layout.interleave}"
    if course.sharded:
        found += " --use-distributed-optimizer"
    return f"{found} --train-iters {course.steps} {extra}"


def memory(a: Agent, worker: str) -> Path:
    """Return where a worker, which is alone on its node, has copies."""
    return a.folder / "memory" / worker


async def follow(a: Agent, spec_file: SpecFile, folder: Path, course: Course, extra: str = "", *, quiet: bool) -> None:
    """Train, through the course's faults or without any; ``extra``: further arguments."""
    fields = {
        "script": str(write_script(folder, arguments(course, extra))),
        "deterministic_sums": not any(place == "launch" for place, _ in course.faults),
    }
    memory_every = {"every": 0, "memory_every": 1}
    spec = spec_file(exact=False, steps=course.steps, checkpoint=memory_every, **fields)
    workers, stages = plan(course)
    faults = {}
    for number, (stage, (place, _)) in enumerate(zip(stages, course.faults, strict=True)):
        faults[stage.victim] = f"{stage.victim}:{place}:{PLACES[place]}:{2 + 2 * number}"
    where = {"PYTHONPATH": os.pathsep.join(filter(None, (CHECKOUT, os.environ.get("PYTHONPATH"))))}

    def environment(worker: str) -> dict[str, str]:
        fault = "" if quiet else faults.get(worker, "")
        node = {"UNICRON_NODE": worker, "UNICRON_DOMAIN": worker, "UNICRON_MEMORY": str(memory(a, worker))}
        return {"UNICRON_TEST_FAULT": fault} | node | WRITES_AT_ONCE | where

    async def start(started: Sequence[str]) -> None:
        await asyncio.gather(*(a.fork(worker, spec, environment(worker)) for worker in started))

    await start(workers)
    tensor, pipeline = course.layout.tensor, course.layout.pipeline
    await a.configure(dict.fromkeys(workers, "initial"), tensor=tensor, pipeline=pipeline)
    for stage in [] if quiet else stages:
        await a.until(partial(a.exits.__contains__, stage.victim), 400)
        gone = [stage.victim, *stage.dropped]
        for worker in stage.dropped:
            a.kill(worker)
        for worker in gone:
            shutil.rmtree(memory(a, worker), ignore_errors=True)
        await a.hold([worker for worker in a.members if worker not in gone])
        await start(stage.started)
        generation = await a.configure(
            stage.members,
            stage="boundary" if stage.started else "interrupted",
            complete=stage.complete,
            tensor=tensor,
            pipeline=pipeline,
        )
        resumed = await a.resumed(generation)
        assert {one.steps_recomputed for one in resumed} == {0}
    await a.until(lambda: all(worker in a.exits for worker in a.members), 400)
    assert [a.exits[w][1] for w in a.members] == [0] * len(a.members), a.output(a.members[0])[-3000:]


@pytest.mark.parametrize(
    ("course", "extra"),
    [
        *((course, "") for course in COURSES),
        *((Course(DP2, True, faults), OVERLAPS) for faults in (IN_PLACE, OVERLAPPED)),
    ],
    ids=str,
)
async def test_faults_cost_no_step_and_leave_the_parameters_as_they_are(
    course: Course, extra: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    for name in ("quiet", "faulty"):
        async with agent(tmp_path / f"{name}-agent") as a:
            await follow(a, spec_file, tmp_path / name, course, extra, quiet=name == "quiet")
            assert (name == "quiet") == (not a.of(Resumed, generation=2))
    found = parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")
    assert farthest(*found) <= ROUNDING if course.faults == OVERLAPPED else differing(*found) == []
    saved = tmp_path / "faulty" / "checkpoints"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(course.steps)
