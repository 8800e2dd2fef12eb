"""Checkpoints are written beside training, and a task survives damaged and unfinished ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from tests.unicron.test_recovery import begin, check_result
from tests.unicron.zygote import WRITES_AT_ONCE
from unicron.checkpoint import archive
from unicron.protocol.messages import Checkpointed, CheckpointFailed, Stop, StopRefused


def damage(location: str) -> None:
    """Change one bit of a checkpoint's largest file."""
    victim = max(Path(location).glob("*.safetensors"), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)


def check_formats(location: str) -> None:
    """Check that a checkpoint is one manifest, and files that the library of safetensors reads."""
    names = {path.name for path in Path(location).iterdir()}
    files = archive.read(location).files
    assert names == {archive.MANIFEST, *files}
    for name, described in files.items():
        tensors = load_file(Path(location, name))
        assert tensors.keys() == described.chunks.keys()
        assert {key: str(tensor.dtype) for key, tensor in tensors.items()} == {
            key: f"torch.{chunk.dtype}" for key, chunk in described.chunks.items()
        }


async def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(checkpoint={"every": 2})
    workers = ["w0", "w1"]
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, workers, "1:6:1:hang", WRITES_AT_ONCE)
        await a.lose("w1", 6)
        a.kill("w0")
        await a.until(lambda: "w0" in a.exits)
        before, newest = a.of(Checkpointed)
        assert (before.step, newest.step) == (2, 4)
        assert archive.published(newest.path) == [newest.path, before.path]
        damage(newest.path)
        await asyncio.gather(*(a.fork(worker, spec) for worker in workers))
        generation = await a.configure(dict.fromkeys(workers, "checkpoint"), checkpoint=newest.path, fault_step=5)
        resumed = await a.resumed(generation)
        assert {(r.source, r.step, r.steps_recomputed) for r in resumed} == {("checkpoint", 3, 3)}
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
    spec = spec_file(checkpoint={"every": 4})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1", "w2"], "2:4:checkpoint:hang", WRITES_AT_ONCE)
        await a.lose("w2", 5)
        survivors = ["w0", "w1"]
        await a.hold(survivors)
        first = tmp_path / "run" / "generation-1" / "checkpoints"
        assert [p.name for p in first.iterdir()] == ["step-4"]
        assert archive.published(f"{first}/step-4") == []
        await a.configure(dict.fromkeys(survivors, "live"), stage="interrupted")
        finished = await a.finished(2)
        assert not list(first.iterdir())
        assert not [m for m in a.of(Checkpointed) if m.generation == 1]
        # What was given up is made up for, at the new generation's first boundary.
        assert [m.step for m in a.of(Checkpointed)] == [5]
        await check_result(a, spec, finished)


@pytest.mark.slow
async def test_what_cannot_be_saved_is_reported_and_not_stopped(tmp_path: Path, spec_file: SpecFile) -> None:
    """Training goes on to the right result; a rank stops without a checkpoint only if it is told to."""
    (tmp_path / "file").touch()
    spec = spec_file(checkpoint={"every": 2, "directory": str(tmp_path / "file")})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1"], "1:4:0:hang", WRITES_AT_ONCE)
        await a.stopped("w1")
        await a.until(lambda: a.of(CheckpointFailed))
        assert "NotADirectoryError" in a.of(CheckpointFailed)[0].reason
        a.send_all(["w0", "w1"], Stop(generation=1))
        await a.until(lambda: len(a.of(StopRefused)) >= 2)
        assert "NotADirectoryError" in a.of(StopRefused)[0].reason
        await check_result(a, spec, await a.finished(2))  # of all steps
    assert not a.errors()


async def test_only_the_newest_are_kept(tmp_path: Path, spec_file: SpecFile) -> None:
    spec = spec_file(checkpoint={"every": 1, "keep": 3})
    async with agent(tmp_path / "run") as a:
        await begin(a, spec, ["w0", "w1"], env=WRITES_AT_ONCE)
        await a.finished(2)
        reported = [m.path for m in a.of(Checkpointed)]
        assert [archive.step(path) for path in reported] == [1, 2, 3, 4, 5]
        assert archive.published(reported[0]) == reported[:-4:-1]
        left = (tmp_path / "run" / "generation-1" / "checkpoints").iterdir()
        assert sorted(str(p) for p in left) == sorted(reported[-3:])
        check_formats(reported[-1])
