"""Checkpoints are written beside training, and a task survives damaged and unfinished ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from tests.unicron.test_recovery import begin, check_result
from unicron.checkpoint import archive
from unicron.protocol import Checkpointed, Progress

pytestmark = pytest.mark.timeout(120)


async def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(steps=16, checkpoint={"every": 2})
    workers = ["w0", "w1"]
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, workers)
        await a.until(lambda: len({m.path for m in a.of(Checkpointed)}) >= 2)
        for worker in workers:
            a.kill(worker)
        await a.until(lambda: set(workers) <= set(a.exits))
        applied = max(m.step for m in a.of(Progress) if m.phase == "ended")
        await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
        *_, before, newest = archive.published(Path(a.of(Checkpointed)[-1].path))[::-1]
        victim = max(newest.glob("*.distcp"), key=lambda p: p.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
        generation = await a.configure(dict.fromkeys(workers, "checkpoint"), checkpoint=str(newest), fault_step=applied)
        step = archive.step(before)
        resumed = await a.resumed(generation)
        assert {(r.source, r.step, r.steps_recomputed) for r in resumed} == {("checkpoint", step + 1, applied - step)}
        assert "is not what was written" in a.output("w0") + a.output("w1")
        await check_result(a, spec, await a.finished(2))


async def test_without_a_whole_checkpoint_the_task_does_not_begin_anew(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file()
    async with agent(tmp_path / "run") as a:
        await asyncio.gather(*(a.fork(worker, spec) for worker in ("w0", "w1")))
        await a.configure(dict.fromkeys(("w0", "w1"), "checkpoint"), checkpoint=str(tmp_path / "none" / "step-3"))
        await a.until(lambda: {"w0", "w1"} <= set(a.exits))
        assert {m.error for m in a.errors()} == {"DamagedCheckpoint"}


async def test_a_fault_while_a_checkpoint_is_written_leaves_none_of_it(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(steps=12, checkpoint={"every": 4})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1", "w2"], "2:4:checkpoint:hang")
        await a.lose("w2", 5)
        survivors = ["w0", "w1"]
        await a.hold(survivors)
        first = tmp_path / "run" / "generation-1" / "checkpoints"
        assert [p.name for p in first.iterdir()] == [".step-4.partial"]
        await a.configure(dict.fromkeys(survivors, "live"), stage="interrupted")
        finished = await a.finished(2)
        assert not list(first.iterdir())
        assert not [m for m in a.of(Checkpointed) if m.generation == 1]
        # What was given up is made up for.
        steps = [m.step for m in a.of(Checkpointed)]
        assert steps[0] in (4, 5)
        assert steps == sorted(set(steps))
        await check_result(a, spec, finished)


async def test_only_the_newest_are_kept(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(steps=40, checkpoint={"every": 2, "keep": 3})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1"])
        await a.finished(2)
        reported = [Path(m.path) for m in a.of(Checkpointed)]
        assert len(reported) > 3
        assert archive.published(reported[0]) == reported[:-4:-1]
        assert not list((tmp_path / "run" / "generation-1" / "checkpoints").glob(".step-*"))
