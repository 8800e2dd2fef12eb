"""The return of storage that refuses a task's result."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from services.agent.files import storage_return
from services.agent.files.storage_return import StorageReturns
from services.agent.node.process import Process
from tests.condition import until

PROCESS = Process(id="i-1", task="gpt", worker="n0/0", generation=1)


@contextmanager
def replaced(folder: Path) -> Iterator[Callable[[], object]]:
    """A file stands in place of the folder: nobody can write below it. Yield what takes it away."""
    folder.write_text("")
    yield folder.unlink


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[Callable[[], object]]:
    with mounted(folder, "ro,size=4m"):
        yield lambda: subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


@contextmanager
def full(folder: Path) -> Iterator[Callable[[], object]]:
    with mounted(folder, "size=4m"):
        ballast = folder / "ballast"
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(bytes(8 << 20))
        yield ballast.unlink


@pytest.mark.parametrize("blocked", [replaced, read_only, full])
async def test_the_return_of_storage_is_told_once(
    blocked: Callable[[Path], AbstractContextManager[Callable[[], object]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[bool] = []
    takes_a_file = storage_return.takes_a_file

    def looked(folder: Path) -> bool:
        looks.append(takes_a_file(folder))
        return looks[-1]

    monkeypatch.setattr(storage_return, "takes_a_file", looked)
    place = tmp_path / "storage"
    reported: list[Process] = []
    returns = StorageReturns(look_s=0.01)
    folders = [str(tmp_path), str(place / "generation-1" / "result")]
    with blocked(place) as mend:
        looking = asyncio.create_task(returns.wait(PROCESS, folders, reported.append))
        await until(lambda: False in looks)
        assert reported == []
        mend()
        await until(looking.done)
        assert reported == [PROCESS]
        assert [path for path in place.rglob("*") if path.is_file()] == [], "the small files are gone"
    await returns.wait(PROCESS, folders, reported.append)
    assert reported == [PROCESS]


async def test_storage_that_takes_a_file_from_the_beginning_tells_nothing(tmp_path: Path) -> None:
    reported: list[Process] = []
    returns = StorageReturns(look_s=0.01)
    await returns.wait(PROCESS, [str(tmp_path / "result")], reported.append)
    assert reported == []
    assert os.listdir(tmp_path) == []
