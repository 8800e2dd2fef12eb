"""Faults on a backend that behaves as NCCL does (``tests.unicron.contract``): survivors finish the step, in place."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.courses import TaskLayout
from tests.unicron.conftest import SpecFile, largest_difference
from tests.unicron.contract import settings
from tests.unicron.contract_course import DP2, DP3, PP, STEP, TP, Course, CourseFault, Task, check, fields_of, follow
from tests.unicron.harness import agent, reference_of
from tests.unicron.test_recovery import every_step
from unicron.protocol.messages import Configure, Progress, Raised, Resumed

pytestmark = pytest.mark.timeout(150)

POINTS = ("2", "reduce", "update")
KINDS = ("kill", "exception", "sleep")
RETRIED = ("2", "1.forward", "1.backward", "reduce", "reduce:1", "update")
LAGS = ((settings.LAG_S, "0.05"),)
MEETS = ((settings.DESTROY_MEETS, "1"),)

KILL_OR_SLEEP = pytest.mark.parametrize("kind", ["kill", pytest.param("sleep", marks=pytest.mark.parity)])

GATE = (
    Course(DP3, (CourseFault("2", "kill"), CourseFault("update", "sleep", (2,))), "silent"),
    Course(PP, (CourseFault("reduce:1", "communication"), CourseFault("reduce", "exception"))),
    Course(DP2, (CourseFault("update", "kill"),), "silent", sharded=True),
    Course(TP, (CourseFault("1.backward", "communication"),), "silent", variables=LAGS),
    Course(PP, (CourseFault("1", "kill"),), "silent", returns=True, ahead=True),
    Course(DP2, (CourseFault("gather", "communication"),), "silent", sharded=True, ahead=True),
)
"""Every point of ``POINTS``, every kind of ``KINDS``, and every layout, mode and optimizer occurs."""

SHORT = (
    *GATE,
    Course(PP, (CourseFault("reduce", "exception"),)),
    Course(PP, (CourseFault("reduce:1", "communication"),)),
    Course(DP3, (CourseFault("update", "exception"), CourseFault("reduce", "kill", (2,)))),
    Course(DP3, (CourseFault("2", "exception", (1, 2)),)),
    Course(TP, (CourseFault("2", "sleep"),), "silent"),
    Course(DP3, (CourseFault("reduce", "sleep"),), sharded=True),
    Course(DP2, (CourseFault("reduce:1", "kill"),)),
    Course(TP, (CourseFault("2", "kill"),), "silent", returns=True, ahead=True),
)
"""Every point of ``POINTS`` meets every kind of ``KINDS``."""


def every_course() -> list[Course]:
    courses = [
        *(Course(layout, (CourseFault(at, kind),)) for layout in (DP2, DP3, TP, PP) for at in POINTS for kind in KINDS),
        *(
            Course(layout, (CourseFault(at, kind, (layout.size - 1,)),), sharded=True)
            for layout in (DP2, DP3, TP, PP)
            for at in POINTS
            for kind in ("kill", "sleep")
        ),
        *(Course(DP3, (CourseFault("2", one), CourseFault(at, other, (2,)))) for one, other, at in TWICE),
        *(Course(DP3, (CourseFault(at, kind, (1, 2)),)) for at in POINTS for kind in KINDS),
        *(Course(layout, (CourseFault(at, "kill"),), returns=True) for layout in (DP2, TP, PP) for at in POINTS),
        Course(DP3, (CourseFault("2", "sleep"), CourseFault("reduce", "kill", (2,))), sharded=True),
        *(Course(layout, (CourseFault("reduce:1", "kill"),)) for layout in (DP3, TP, PP)),
        *(Course(layout, (CourseFault(at, "communication"),)) for layout in (DP2, TP, PP) for at in RETRIED),
        *(
            Course(layout, (CourseFault(at, "communication"),), sharded=True)
            for layout in (DP2, TP, PP)
            for at in ("1.backward", "launch:1", "update", "gather")
        ),
        *(Course(layout, (CourseFault(at, "kill"),), variables=LAGS) for layout in (DP3, TP) for at in POINTS),
        *(Course(layout, (CourseFault("1.backward", "communication"),), variables=LAGS) for layout in (TP, PP)),
        *(
            Course(layout, (CourseFault(at, kind),), returns=kind != "communication", ahead=True)
            for layout, at in ((TP, "2"), (PP, "1"))
            for kind in ("kill", "sleep", "communication")
        ),
        *(
            Course(layout, (CourseFault("gather", "communication"),), sharded=True, ahead=True)
            for layout in (DP2, DP3, TP, PP)
        ),
    ]
    found = [replace(course, mode=mode) for mode in ("sockets", "silent") for course in courses]
    # Over sockets a host is not ahead for long of a peer that dies or aborts: it is refused what it issues then.
    return [course for course in found if not (course.ahead and course.mode == "sockets" and course.breaks_connections)]


TWICE = (
    ("kill", "kill", "reduce"),
    ("sleep", "exception", "2"),
    ("exception", "sleep", "update"),
    ("kill", "sleep", "update"),
)
"""Kinds of two faults, and the second one's point."""


@pytest.mark.parametrize(
    "course", [course if course in GATE else pytest.param(course, marks=pytest.mark.slow) for course in SHORT], ids=str
)
async def test_a_few_courses(course: Course, tmp_path: Path, spec_file: SpecFile, shared_memory: Path) -> None:
    await follow(course, tmp_path, spec_file, shared_memory)


@pytest.mark.parity
@pytest.mark.parametrize("course", [course for course in every_course() if course not in SHORT], ids=str)
async def test_every_course(course: Course, tmp_path: Path, spec_file: SpecFile, shared_memory: Path) -> None:
    await follow(course, tmp_path, spec_file, shared_memory)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP, pytest.param(PP, marks=pytest.mark.parity)], ids=str)
async def test_a_rank_of_a_whole_replica_leaves_before_its_peer(
    layout: TaskLayout, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """One leaves between two steps. The other is in the second one's passes, and waits for what will never come.

    Its own abort of what it has with other replicas must not wait for that, too. What it aborts in its replica the
    first one has to abort as well: a destruction may wait for it.
    """
    floor = ("UNICRON_FINISH_FLOOR_S", "1")  # it is left to itself until its replica counts as stuck
    course = Course(layout, (CourseFault("update", "kill"),), "silent", variables=(floor, *MEETS))
    first, second = ("w2", "w3") if layout is TP else ("w0", "w2")
    async with agent(tmp_path / "run") as a:
        spec = spec_file(**fields_of(course) | {"checkpoint": {"every": STEP}})
        task = Task(a, spec, course, shared_memory)
        task.more_faults = f"{second[1:]}:{STEP}:checkpoint:communication"
        await task.begin()
        await a.until(lambda: a.of(Raised, second))
        await a.in_step([first], STEP + 1, "begun")
        await a.until(lambda: "w1" in a.exits)
        await task.hold([worker for worker in task.members if worker != "w1"])
        await task.go_on(["w1"], STEP - 1)
        assert set(task.members) == {first, second}
        await check(task, spec_file)


@pytest.mark.slow
@KILL_OR_SLEEP
async def test_a_newcomer_is_lost_while_state_moves(
    kind: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """The others are in the collective that moves state, or in one that follows it."""
    course = Course(DP2, (CourseFault("2", "kill"),))
    async with agent(tmp_path / "run") as a:
        task = Task(a, spec_file(**fields_of(course)), course, shared_memory)
        await task.begin()
        await task.happens(0, ["w1"], ["w0"])
        await task.hold(["w0"])
        pid = a.pids["w0"]
        await task._fork(["w2"], f"1:1:move:0:{kind}:always")
        generation = await task._configure({"w0": "live", "w2": "take"}, stage="boundary")
        task.members = ["w0", "w2"]
        if kind == "kill":
            await a.until(lambda: "w2" in a.exits)
        else:
            await a.until(lambda: any(m.setup_parts == 2 for m in a.of(Progress, "w2", generation)))
        await task.hold(["w0"])
        await task.lose(["w2"])
        task.members, task.layout = ["w0"], TaskLayout(1, 1, 1)
        await task.resume(await task._configure({"w0": "live"}, stage="interrupted"))
        assert a.pids["w0"] == pid
        await check(task, spec_file)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("sockets", marks=pytest.mark.parity), "silent"])
async def test_a_member_is_lost_before_it_comes(
    mode: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """The others wait for it where communicators are made."""
    course = Course(DP3, (), mode)
    async with agent(tmp_path / "run") as a:
        spec = spec_file(**fields_of(course) | {"steps": STEP})
        task = Task(a, spec, course, shared_memory)
        await task._fork(task.members)
        a.kill("w2")
        await a.until(lambda: "w2" in a.exits)
        port = await a.store()
        a.generation = 1
        listed = [[rank, worker, "initial"] for rank, worker in enumerate(task.members)]
        for rank, worker in enumerate(task.members[:2]):
            a.send(
                worker,
                Configure(
                    generation=1, stage="boundary", rank=rank, world_size=3, tensor=1, pipeline=1,
                    store_host="127.0.0.1", store_port=port, members=listed, directory=str(a.folder / "generation-1"),
                ),
            )  # fmt: skip
        await a.until(lambda: all(a.of(Progress, worker, 1) for worker in task.members[:2]))
        await task.hold(task.members[:2])
        task.members, task.layout = task.members[:2], DP2
        await task.resume(await task._configure(dict.fromkeys(task.members, "initial")))
        assert not a.of(Raised)
        finished = await a.finished(2)
        reference = await reference_of(a, spec)
        assert largest_difference(finished.parameters_path, reference.parameters_path) == 0.0


@pytest.mark.slow
@KILL_OR_SLEEP
async def test_a_survivor_is_lost_while_the_others_make_communicators(
    kind: str, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    course = Course(DP3, (CourseFault("2", "kill"),), "silent")
    async with agent(tmp_path / "run") as a:
        task = Task(a, spec_file(**fields_of(course)), course, shared_memory)
        await task.begin()
        await task.happens(0, ["w1"], ["w0", "w2"])
        await task.hold(["w0", "w2"])
        # A stopped process is told nothing, so it does not come to where the other waits for it.
        a.kill("w2", signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        generation = await task._configure({"w0": "live", "w2": "live"}, stage="interrupted")
        task.members = ["w0", "w2"]
        await a.until(lambda: a.of(Progress, "w0", generation))
        await task.hold(["w0"])
        await task.lose(["w2"])
        task.members, task.layout = ["w0"], TaskLayout(1, 1, 1)
        await task.resume(await task._configure({"w0": "live"}, stage="interrupted"))
        await check(task, spec_file)


@pytest.mark.slow
async def test_a_hold_comes_while_the_generation_before_is_left(
    tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    """After a drain the communicators of a replica are intact. One thread aborts them, whoever it is."""
    course = Course(TP, (), "silent", variables=((settings.ABORT_S, "0.6"),))
    async with agent(tmp_path / "run") as a:
        task = Task(a, spec_file(**fields_of(course)), course, shared_memory)
        task.more_faults = "0:2:0:hang"
        await task.begin()
        await a.stopped("w0")
        await a.drain(task.members)
        generation = await task._configure(dict.fromkeys(task.members, "live"))
        await a.until(lambda: all(a.of(Progress, worker, generation) for worker in task.members))
        await task.hold(task.members)
        await task.resume(await task._configure(dict.fromkeys(task.members, "live"), stage="interrupted"))
        await check(task, spec_file)


@pytest.mark.slow
async def test_a_member_is_lost_behind_a_drain(tmp_path: Path, spec_file: SpecFile, shared_memory: Path) -> None:
    """What the others had with it is intact. A destruction may wait for it; an abort does not."""
    course = Course(DP2, (), "silent", variables=MEETS)
    async with agent(tmp_path / "run") as a:
        task = Task(a, spec_file(**fields_of(course)), course, shared_memory)
        task.more_faults = "0:2:0:hang"
        await task.begin()
        await a.stopped("w0")
        await a.drain(task.members)
        await task.lose(["w1"])
        task.members, task.layout = ["w0"], TaskLayout(1, 1, 1)
        await task.resume(await task._configure({"w0": "live"}))
        await check(task, spec_file)


async def hold_again_and_again(course: Course, folder: Path, spec_file: SpecFile, memory: Path, times: int) -> None:
    """Hold all at any moment: in a step, while communicators are made, while the ranks agree."""
    rng = random.Random(str(course))
    async with agent(folder / "run") as a:
        task = Task(a, spec_file(**fields_of(course) | {"steps": 200}), course, memory)
        # Whatever the time between configuring and holding is, the task does not come to its end.
        task.more_faults = every_step("0", 150, 200)
        await task.begin()
        await a.resumed(1)
        for _ in range(times):
            await task.hold(task.members)
            await task._configure(dict.fromkeys(task.members, "live"), stage="interrupted")
            await asyncio.sleep(rng.uniform(0.0, 0.4))
        a.go_on(task.members)
        await a.until(lambda: len(a.of(Resumed, generation=a.generation)) == len(task.members) or a.exits)
        task._check_alive(task.members)
        assert len({message.step for message in a.of(Resumed, generation=a.generation)}) == 1
        assert not [m for m in a.errors() if m.kind != "communication"]


async def test_a_hold_at_any_moment_is_answered(tmp_path: Path, spec_file: SpecFile, shared_memory: Path) -> None:
    await hold_again_and_again(Course(TP, (), "silent"), tmp_path, spec_file, shared_memory, 4)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", [DP2, DP3, TP, PP], ids=str)
@pytest.mark.parametrize("mode", ["sockets", "silent"])
async def test_many_holds_at_any_moment_are_answered(
    layout: TaskLayout, mode: str, seed: int, tmp_path: Path, spec_file: SpecFile, shared_memory: Path
) -> None:
    course = Course(layout, (), mode, variables=((settings.SEED, str(seed)),))
    await hold_again_and_again(course, tmp_path, spec_file, shared_memory, 20)
