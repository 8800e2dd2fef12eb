"""Whatever is lost, wherever, and in whatever layout it goes on: the result is the failure-free run's."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parity.courses import CHANGES, LAYOUTS, POINTS, SETTINGS, Course, Stage, TaskLayout, matrix, pairwise, plan
from tests.unicron.conftest import largest_difference
from tests.unicron.harness import Agent, agent
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.protocol.messages import Checkpointed, Finished
from unicron.trainer import corpus

pytestmark = pytest.mark.timeout(300)

LARGE = {"UNICRON_BUCKET_BYTES": str(64 << 10)}
"""As for a large model: several buckets on each rank."""

ROUNDING = 1e-6
"""Of parameters of at most 1, by SGD."""

EXACT = Course(
    TaskLayout(1, 1, 3), False, (("1", "retry"), ("apply", "shrink"), ("checkpoint", "same"), ("reduce:1", "relayout"))
)
DEFAULT = Course(
    TaskLayout(1, 1, 4), False, (("1", "shrink"), ("reduce:1", "shrink"), ("1.backward", "grow")), exact=False
)
INTERLEAVED = Course(
    TaskLayout(1, 2, 1, interleave=2), False, (("1", "retry"), ("1.backward", "same"), ("reduce:1", "relayout"))
)
SEQUENCE = Course(
    TaskLayout(2, 1, 1, interleave=2), False, (("reduce:1", "same"), ("1.backward", "relayout")), settings="sequence"
)
"""The second layout has the tied embeddings on two stages, of two model chunks each."""
BF16 = Course(TaskLayout(1, 2, 1), True, (("apply", "same"), ("reduce:1", "relayout")), settings="bf16")
"""The first layout computes activations again after the forward passes of later micro-batches; the second divides the
optimizer."""

SPLIT = tuple(
    Course(layout, False, faults, exact=False)
    for layout, faults in (
        (
            TaskLayout(2, 1, 2),
            (("1.backward", "same"), ("reduce:1", "same"), ("update", "retry"), ("reduce", "shrink")),
        ),
        (TaskLayout(1, 2, 2), (("1.forward", "same"), ("reduce:1", "shrink"), ("1.backward", "retry"))),
    )
)
"""In the default mode, where a pass adds to the sums of all shards of its replica."""


def write_spec(folder: Path, course: Course, text: Path) -> Path:
    settings = SETTINGS[course.settings]
    shape = {"layers": 2 * course.layout.interleave, "hidden": 32, "heads": 2, "sequence_length": 16}
    parallel = {"distributed_optimizer": course.sharded, "interleave": course.layout.interleave}
    spec = {
        "name": "a",
        "model": shape | settings.get("model", {}),
        "batch": {"global": 8},
        "steps": course.steps,
        "data": str(text),
        "dropout": 0.1,
        "optimizer": {"name": "adam"} if course.exact else {"name": "sgd", "lr": 0.1},
        "checkpoint": {"every": 2, "memory_every": 1},
        "parallel": parallel | settings.get("parallel", {}),
        "bf16": settings.get("bf16", False),
        "exact": course.exact,
    }
    path = folder / f"{course.sharded}.json"
    path.write_text(json.dumps(spec))
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.write(tmp_path_factory.mktemp("corpus") / "corpus.txt", size_bytes=50_000)


async def failure_free(a: Agent, folder: Path, course: Course, text: Path) -> Finished:
    """Train without a fault: one replica, one pipeline stage, an optimizer that is not divided."""
    tensor = course.layout.tensor
    plain = Course(
        TaskLayout(tensor, 1, 1, course.layout.interleave), False, course.faults, course.exact, course.settings
    )
    spec = write_spec(folder, plain, text)
    workers = [f"reference{i}" for i in range(tensor)]
    await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
    await a.configure(dict.fromkeys(workers, "initial"), tensor=tensor)
    return await a.finished(tensor)


async def follow(a: Agent, spec: Path, course: Course) -> Finished:
    """Train through the course's faults."""
    workers, stages = plan(course)
    faults: dict[str, str] = {}
    for stage in stages:
        faults[stage.victim] = ",".join(filter(None, [faults.get(stage.victim, ""), stage.fault]))

    async def start(started: Sequence[str]) -> None:
        await asyncio.gather(*(a.fork(w, spec, LARGE | _node(a, w, faults.get(w, ""))) for w in started))

    await start(workers)
    layout = course.layout
    await a.configure(dict.fromkeys(workers, "initial"), tensor=layout.tensor, pipeline=layout.pipeline)
    for stage in stages:
        await heal(a, stage)
        await start(stage.started)
        saved = a.of(Checkpointed)
        generation = await a.configure(
            stage.members,
            stage="boundary" if stage.started else "interrupted",
            tensor=stage.layout.tensor,
            pipeline=stage.layout.pipeline,
            checkpoint=saved[-1].path if saved and not stage.complete else "",
            complete=stage.complete,
        )
        await a.resumed(generation)
    return await a.finished(len(a.members))


def _node(a: Agent, worker: str, fault: str) -> dict[str, str]:
    """Return the environment of a worker on a node of its own."""
    memory = str(_memory(a, worker))
    own = {"UNICRON_FAIL_AT": fault, "UNICRON_NODE": worker, "UNICRON_DOMAIN": worker, "UNICRON_MEMORY": memory}
    return own | WRITES_AT_ONCE


def _memory(a: Agent, worker: str) -> Path:
    return a.folder / "memory" / worker


async def heal(a: Agent, stage: Stage) -> None:
    """Wait for the fault, hold the others and release those that are not needed."""
    if stage.lost:
        await a.until(lambda: stage.victim in a.exits)
        shutil.rmtree(_memory(a, stage.victim), ignore_errors=True)
        await a.hold([worker for worker in a.members if worker != stage.victim])
    else:
        await a.until(lambda: any(m.generation == a.generation for m in a.errors()))
        await a.hold(a.members)
    for worker in stage.dropped:
        a.kill(worker)
    await a.until(lambda: all(worker in a.exits for worker in stage.dropped))


async def check(course: Course, folder: Path, text: Path) -> None:
    async with agent(folder / "run") as a:
        spec = write_spec(folder, course, text)
        finished = await follow(a, spec, course)
        a.messages.clear()
        reference = await failure_free(a, folder, course, text)
    assert (finished.step, finished.samples_sha256) == (course.steps, reference.samples_sha256)
    difference = largest_difference(finished.parameters_path, reference.parameters_path)
    if course.exact:
        assert (difference, finished.loss) == (0.0, reference.loss)
    else:
        assert difference <= ROUNDING


@pytest.mark.parametrize(
    "course",
    [DEFAULT, INTERLEAVED, *(pytest.param(c, marks=pytest.mark.slow) for c in (EXACT, SEQUENCE, BF16))],
    ids=str,
)
async def test_a_course_in_each_mode(course: Course, tmp_path: Path, text: Path) -> None:
    await check(course, tmp_path, text)


@pytest.mark.parity
@pytest.mark.parametrize("course", SPLIT, ids=str)
async def test_courses_of_sums_in_place_in_split_models(course: Course, tmp_path: Path, text: Path) -> None:
    await check(course, tmp_path, text)


@pytest.mark.parity
@pytest.mark.parametrize("course", pairwise(), ids=str)
async def test_courses_that_meet_every_pair(course: Course, tmp_path: Path, text: Path) -> None:
    await check(course, tmp_path, text)


@pytest.mark.parity
@pytest.mark.parametrize("course", matrix(), ids=str)
async def test_every_combination(course: Course, tmp_path: Path, text: Path) -> None:
    await check(course, tmp_path, text)


def test_the_few_courses_do_meet_every_pair() -> None:
    met = {
        pair
        for course in pairwise()
        for at, change in course.faults
        for pair in (
            (at, str(course.layout)),
            (at, course.sharded),
            (change, str(course.layout)),
            (change, course.sharded),
        )
    }
    for value in (*POINTS, *CHANGES):
        for other in (*map(str, LAYOUTS), False, True):
            assert (value, other) in met, (value, other)
