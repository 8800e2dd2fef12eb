"""Limits of the output of ranks: with real files, processes that write without a pause, and a real agent."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.agent.agent import Agent
from services.agent.node.process import Process
from services.agent.ranks import output_limits
from services.agent.ranks.output_limits import LEFT_OUT, OutputLimits
from shared.settings.model import Settings
from tests.agent.kit import WAIT_S, Driver, Ear
from tests.condition import until

LIMIT_BYTES = 1 << 20

WRITER = """
import os, sys
block = b"x" * 65535 + b"\\n"
descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(int(sys.argv[2])):
    os.write(descriptor, block)
os.write(descriptor, b"the end\\n")
"""


def process(path: Path, name: str = "p1") -> Process:
    return Process(id=name, task="gpt", worker="n0/0", generation=1, output=str(path))


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


@asynccontextmanager
async def limited(*processes: Process, counters: dict[str, int] | None = None, **given: int) -> AsyncIterator[None]:
    settings = Settings(rank_output_bytes=given.get("most_bytes", LIMIT_BYTES), rank_output_files=given.get("files", 0))
    limits = OutputLimits(settings, counters if counters is not None else {})
    task = asyncio.create_task(limits.keep(lambda: processes))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_process_that_writes_without_a_pause_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_limits, "LOOK_S", 0.005)
    path, blocks = tmp_path / "1-n0-0.log", 4096  # 256 MiB
    counters: dict[str, int] = {}
    async with limited(process(path), counters=counters):
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, str(path), str(blocks))
        async with asyncio.timeout(WAIT_S):
            assert await writer.wait() == 0
        await until(lambda: on_disk(path) <= LIMIT_BYTES)
    size = path.stat().st_size
    assert size == blocks * 65536 + len("the end\n")  # offsets are as if nothing were gone
    with path.open("rb") as file:
        file.seek(size - 65544)
        assert file.read() == b"x" * 65535 + b"\nthe end\n"
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) >= size - LIMIT_BYTES
    assert size - LIMIT_BYTES <= counters[LEFT_OUT] < size


async def test_what_is_within_the_limit_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_limits, "LOOK_S", 0.005)
    small, large = tmp_path / "1-n0-0.log", tmp_path / "1-n0-1.log"
    small.write_bytes(b"y" * (LIMIT_BYTES // 2))
    large.write_bytes(b"y" * 3 * LIMIT_BYTES)
    async with limited(process(small), process(large, "p2")):
        await until(lambda: on_disk(large) <= LIMIT_BYTES)
    assert small.read_bytes() == b"y" * (LIMIT_BYTES // 2)
    async with limited(process(tmp_path / "none.log"), process(small), most_bytes=0):
        await asyncio.sleep(0)
    assert small.stat().st_size == LIMIT_BYTES // 2


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
async def test_what_is_in_the_place_of_the_output_is_left_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_limits, "LOOK_S", 0.005)
    path, other, last = tmp_path / "1-n0-0.log", tmp_path / "other", tmp_path / "1-n0-1.log"
    other.write_bytes(b"z" * 3 * LIMIT_BYTES)
    match kind:
        case "link":
            path.symlink_to(other)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    last.write_bytes(b"y" * 3 * LIMIT_BYTES)
    async with limited(process(path), process(last, "p2")):
        await until(lambda: on_disk(last) <= LIMIT_BYTES)
    assert other.read_bytes() == b"z" * 3 * LIMIT_BYTES


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_takes_the_place_of_the_output_after_the_look_is_left_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "1-n0-0.log", tmp_path / "other"
    other.write_bytes(b"z" * 3 * LIMIT_BYTES)
    seen = other.stat()
    if kind == "link":
        path.symlink_to(other)
    else:
        os.mkfifo(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda *_, **__: seen)
        assert output_limits._free_beyond(path, LIMIT_BYTES) == 0
    assert other.read_bytes() == b"z" * 3 * LIMIT_BYTES


async def test_a_file_system_without_holes_has_the_file_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoHoles:
        @staticmethod
        def fallocate(*_: int) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(output_limits, "LOOK_S", 0.005)
    monkeypatch.setattr(output_limits, "_libc", NoHoles)
    path = tmp_path / "1-n0-0.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, b"y" * 3 * LIMIT_BYTES)
    async with limited(process(path)):
        await until(lambda: path.stat().st_size == 0)
    os.write(descriptor, b"goes on\n")
    os.close(descriptor)
    assert path.read_bytes() == b"goes on\n"


async def test_a_worker_keeps_the_output_of_its_newest_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_limits, "LOOK_S", 0.005)
    names = [f"{generation}-n0-0.log" for generation in (1, 2, 9, 10, 11)]
    others = ["1-n0-1.log", "1-n0-01.log", "1-store-n0.log", "x-n0-0.log"]
    for name in (*names, *others):
        (tmp_path / name).touch()
    async with limited(process(tmp_path / "11-n0-0.log"), files=3):
        await until(lambda: not (tmp_path / "2-n0-0.log").exists())
    assert {*os.listdir(tmp_path)} == {*names[2:], *others}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"rank_output_bytes": LIMIT_BYTES})


async def test_a_rank_that_floods_its_output_trains_on(
    agent: Agent, driver: Driver, ear: Ear, settings: Settings
) -> None:
    assert (await driver.prepare(behaviour="flood")).ok
    assert (await driver.configure()).ok
    await ear.until(lambda: ear.heartbeats[-1].counters.get(LEFT_OUT, 0) > 4 * LIMIT_BYTES)
    steps = ear.heartbeats[-1].workers[0].steps_timed
    await ear.until(lambda: ear.heartbeats[-1].workers[0].steps_timed >= steps + 5)
    assert ear.signals == []
    pause = await driver.ask("hold", 2, workers=driver.workers)
    assert pause.ok
    output = settings.run_dir / "tasks" / "gpt" / "output"
    await until(lambda: all(on_disk(path) <= LIMIT_BYTES for path in output.glob("1-n0-*.log")))
