"""A result that cannot be written: the ranks keep what they have, wait, and try again; a slow one is no hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import Agent, agent
from tests.unicron.test_recovery import begin, check_result
from unicron.protocol.messages import (
    Checkpointed,
    CheckpointFailed,
    Finished,
    Progress,
    Raised,
    Resumed,
    Stop,
    Stopped,
    StopRefused,
)

WORKERS = ["w0", "w1"]


def block(a: Agent, *names: str) -> list[Path]:
    """Put files in place of folders of the first generation: nobody, not even root, can write below them."""
    folder = a.folder / "generation-1"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("")
    return [folder / name for name in names]


async def waiting(a: Agent, tries: int = 2) -> CheckpointFailed:
    """Wait until the result could not be written so many times; return the newest report of it."""

    def failures() -> list[CheckpointFailed]:
        return [m for m in a.of(CheckpointFailed, "w0") if m.reason.startswith("all steps are done")]

    found: CheckpointFailed = await a.until(lambda: f[-1] if len(f := failures()) >= tries else None)
    assert not a.exits
    assert not a.of(Raised)
    return found


@pytest.mark.slow
async def test_a_result_that_cannot_be_written_is_tried_again_without_losing_a_step(
    tmp_path: Path, spec_file: SpecFile
) -> None:
    spec = spec_file()
    async with agent(tmp_path / "run") as a:
        blocked = block(a, "result", "checkpoints")
        await begin(a, spec, WORKERS)
        failed = await waiting(a)
        assert failed.step == 6
        assert "result" in failed.reason
        assert a.phases("w1")[-1] == (6, "checkpoint")
        for path in blocked:
            path.unlink()
        finished = await a.finished(2)
        assert len(a.of(Resumed)) == 2, "nothing was done again"
        await check_result(a, spec, finished)


@pytest.mark.slow
@pytest.mark.parametrize("room", [False, True])
async def test_a_task_that_cannot_write_its_result_stops_where_its_state_can_be_saved(
    room: bool, tmp_path: Path, spec_file: SpecFile
) -> None:
    """A resumption then has only the result left to write."""
    spec = spec_file()
    async with agent(tmp_path / "run") as a:
        block(a, "result", *(() if room else ("checkpoints",)))
        await begin(a, spec, WORKERS)
        await waiting(a)
        saved = {path: path.stat().st_mtime_ns for path in a.folder.glob("generation-1/checkpoints/*/*")}
        assert bool(saved) == room
        a.send_all(WORKERS, Stop(generation=1))
        if not room:
            await a.until(lambda: len(a.of(StopRefused)) == 2)
            (a.folder / "generation-1" / "checkpoints").unlink()
            a.send_all(WORKERS, Stop(generation=1))
        await a.until(lambda: len(a.of(Stopped)) == 2 and set(WORKERS) <= set(a.exits))
        stopped = a.of(Stopped)[0]
        assert stopped.step == 6
        assert {path: path.stat().st_mtime_ns for path in saved} == saved, "what is saved is not written once more"
        assert any(m.path == stopped.path for m in a.of(Checkpointed))
        await a.fork("w2", spec)
        await a.configure({"w2": "checkpoint"}, checkpoint=stopped.path)
        finished = await a.finished(1)
        (resumed,) = a.of(Resumed, generation=2)
        assert (resumed.step, resumed.source) == (6, "checkpoint")
        await check_result(a, spec, finished)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["held", "drained"])
async def test_ranks_that_wait_to_write_answer_a_fault_and_a_drain(
    how: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    spec = spec_file()
    async with agent(tmp_path / "run") as a:
        block(a, "result", "checkpoints")
        await begin(a, spec, WORKERS)
        await waiting(a)
        if how == "held":
            a.kill("w1")
            await a.until(lambda: "w1" in a.exits)
            await a.hold(["w0"])
        else:
            await a.drain(WORKERS)
            a.kill("w1")
        await a.configure({"w0": "live"})
        finished = await a.finished(1)
        assert [m.step for m in a.of(Resumed, generation=2)] == [6]
        assert finished.step == 6
        await check_result(a, spec, finished)


async def test_a_process_lost_while_it_waits_costs_no_step(tmp_path: Path, spec_file: SpecFile) -> None:
    """Nobody but it had the state, which is in its node's memory as well: as it was behind the last step."""
    memory = tmp_path / "memory"
    env = {"UNICRON_MEMORY": str(memory), "UNICRON_NODE": "n0"}
    spec = spec_file(checkpoint={"every": 100, "memory_every": 4})
    async with agent(tmp_path / "run") as a:
        block(a, "result", "checkpoints")
        await begin(a, spec, ["w0"], env=env)
        await waiting(a, tries=3)
        a.kill("w0")
        await a.until(lambda: "w0" in a.exits)
        await a.fork("w1", spec, env)
        await a.configure({"w1": "take"}, complete=False, fault_step=6)
        finished = await a.finished(1)
        (resumed,) = a.of(Resumed, generation=2)
        assert (resumed.step, resumed.source, resumed.steps_recomputed) == (6, "memory", 0)
        await check_result(a, spec, finished)


@pytest.mark.slow
async def test_a_result_that_takes_long_to_write_shows_that_it_is_written(tmp_path: Path, spec_file: SpecFile) -> None:
    """The file is a pipe that nobody reads, so what writes to it waits; and fails once its reader is gone."""
    spec = spec_file()
    async with agent(tmp_path / "run") as a:
        folder = a.folder / "generation-1" / "result"
        folder.mkdir(parents=True)
        pipe = folder / "parameters.safetensors.partial"
        os.mkfifo(pipe)
        await begin(a, spec, WORKERS)

        def shown(worker: str) -> int:
            return sum((m.step, m.phase) == (6, "checkpoint") for m in a.of(Progress, worker))

        await a.until(lambda: all(shown(worker) >= 4 for worker in WORKERS))
        assert not a.of(Finished)
        assert not a.of(CheckpointFailed)
        os.close(os.open(pipe, os.O_RDONLY))
        finished = await a.finished(2)
        (failed,) = a.of(CheckpointFailed)
        assert "BrokenPipeError" in failed.reason
        assert {path.name for path in folder.iterdir()} == {"parameters.safetensors", "summary.json"}
        await check_result(a, spec, finished)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["nowhere", "checkpoint", "copies"])
async def test_workers_are_lent_once_tries_were_in_vain_and_what_is_done_is_kept(
    kept: str, tmp_path: Path, spec_file: SpecFile
) -> None:
    """And the processes end at the request, and others, in their place, only have to write."""
    env = {"UNICRON_LEND_AFTER_S": "2"}
    if kept == "copies":
        env |= {"UNICRON_MEMORY": str(tmp_path / "memory"), "UNICRON_NODE": "n0"}
    spec = spec_file(checkpoint={"every": 100, "memory_every": 4})
    async with agent(tmp_path / "run") as a:
        blocked = block(a, "result", *(() if kept == "checkpoint" else ("checkpoints",)))
        await begin(a, spec, ["w0"], env=env)
        first = await waiting(a, tries=1)
        assert (first.lends, first.folders) == (False, [])
        last = await waiting(a, tries=4)
        assert last.lends == (kept != "nowhere")
        if kept == "nowhere":
            return
        generation = a.folder / "generation-1"
        vain = ["result", *(["checkpoints/step-6"] if kept == "copies" else [])]
        assert last.folders == [str(generation / folder) for folder in vain]
        a.send_all(["w0"], Stop(generation=1, lose_steps=True))
        await a.until(lambda: bool(a.of(Stopped)) and "w0" in a.exits)
        (stopped,) = a.of(Stopped)
        assert (stopped.step, bool(stopped.path)) == (6, kept == "checkpoint")
        for path in blocked:
            path.unlink()
        await a.fork("w1", spec, env)
        source = "checkpoint" if stopped.path else "initial"
        await a.configure({"w1": source}, checkpoint=stopped.path, fault_step=6)
        finished = await a.finished(1)
        (resumed,) = a.of(Resumed, generation=2)
        assert (resumed.step, resumed.source) == (6, "memory" if kept == "copies" else "checkpoint")
        await check_result(a, spec, finished)
